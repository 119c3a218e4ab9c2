"""The environment `python`: it runs the policy's programs and returns their output, until the policy answers.

Programs run like those of the reward `code`. So that conversations can be replayed, the order of sets of strings,
`random` and the addresses in `<... at 0x...>` are reproducible; other addresses and clocks are not.
"""

from __future__ import annotations

import re
import textwrap
import time

from specrl.data.answers import after_thoughts, final_part
from specrl.data.problems import Problem
from specrl.data.rewards.code import BLOCK, printed, write
from specrl.data.rewards.functions import exact_match
from specrl.data.rewards.sandbox import hide_memory

SECONDS = 5.0  # seconds per program
MEMORY_MIB = 1024  # of its address space
LONGEST = 2000  # characters of output that the policy reads: the end, which shows errors
_PROGRAM = "program.py"
_RUNNER = """
import random, resource, sys
memory, name = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_AS, (int(memory),) * 2)
sys.argv = [name]
random.seed(0)
try:
    with open(name) as file:
        exec(compile(file.read(), name, "exec"), {"__name__": "__main__"})
except SystemExit:
    pass
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
_ADDRESS = re.compile(r"(?<= at 0x)[0-9a-f]+(?=>)")


class Python:
    """Runs the last fenced block of a turn, and rewards the right `Answer:` with 1.

    Programs share only the files of their conversation. A turn with neither ends the conversation.
    """

    def reset(self, problem: Problem) -> list[dict[str, str]]:
        self._answer = problem.answer
        return []

    def step(self, text: str) -> tuple[list[dict[str, str]], float, bool]:
        said = after_thoughts(text)
        programs, words = BLOCK.findall(said), BLOCK.sub("", said)
        if "Answer:" in words:
            return [], exact_match("", final_part(words), self._answer), True
        if not programs:
            return [], 0.0, True
        content = f"\n```output\n{_output(textwrap.dedent(programs[-1]))}\n```\n"
        return [{"role": "tool", "content": content}], 0.0, False


def _output(program: str) -> str:
    hide_memory()  # which contains the answer
    try:
        write(_PROGRAM, program)
        found = printed(_RUNNER, [_PROGRAM], "", time.monotonic() + SECONDS, MEMORY_MIB)
    except OSError:  # an earlier program may have used up processes or disk, or replaced the file by a folder
        found = None
    if found is None:
        return f"(none: it was ended, at the latest after {SECONDS:g} s)"
    text = _ADDRESS.sub("0", found).strip()
    return text if len(text) <= LONGEST else f"...{text[-LONGEST:]}"
