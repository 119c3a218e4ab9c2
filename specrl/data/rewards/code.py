"""The reward of code: what a response has written runs against the tests of its row, within the sandbox of rewards."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specrl.config import ConfigError, DataConfig
from specrl.config.base import PositiveFloat, PositiveInt
from specrl.data.rewards.parameters import RewardParameters, check_seconds
from specrl.data.rewards.sandbox import Confinement

MIB = 2**20
LONGEST_OUTPUT = MIB  # bytes of what a program prints that are compared
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""That of the tests, which have none of the variables of `data.reward_environment`."""
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_RUNNER = """
import resource, sys
memory, proof, *names = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_AS, (int(memory),) * 2)
sys.argv = names[:1]
scope = {"__name__": "__main__"}
for name in names:
    with open(name) as file:
        exec(compile(file.read(), name, "exec"), scope)
if proof:
    print(proof, flush=True)
"""
"""Runs a solution and perhaps a test. A solution that ends the process has passed no test, whatever its exit code."""
_SOLUTION, _TEST, _OUTPUT = "solution.py", "test.py", "output"


class CodeParameters(RewardParameters):
    """The parameters of `code`."""

    seconds: PositiveFloat = 10.0
    """The time for all tests of a response; those that have not ended by then are not passed."""
    memory_mib: PositiveInt = 1024
    """The address space of a test."""

    def check(self, config: DataConfig) -> None:
        """Refuse a network, and tests that may outlive their response."""
        check_seconds("code.seconds", self.seconds, config)
        if config.reward_network:
            raise ConfigError(
                'data.reward_network = true with the reward "code": what a model writes may not use the network; set '
                "it to false, and judge in another run"
            )


@dataclass(frozen=True)
class _Test:
    """A Python text that raises nothing, or what a program reads and has to print."""

    text: str = ""
    given: str | None = None
    expected: str = ""


def refuse_open_sandbox(held: Confinement) -> None:
    """Raise ConfigError on a machine whose kernel does not hold all of the sandbox."""
    if gaps := held.gaps(network=False):
        raise ConfigError(
            f'data.reward = "code" runs what a model writes, which on this machine could {gaps}: run it where '
            "`specrl doctor` finds a whole sandbox"
        )


def run_tests(_: str, response: str, answer: str, parameters: CodeParameters) -> float:
    """The share of the tests in `answer` that the last fenced block of a response passes; 0 without a block.

    The caller must be in the sandbox, in an empty folder where it may write.
    """
    tests, blocks = read_tests(answer), _BLOCK.findall(response)
    if not blocks:
        return 0.0
    deadline = time.monotonic() + parameters.seconds
    return sum(_passes(blocks[-1], test, deadline, parameters) for test in tests) / len(tests)


def read_tests(answer: str) -> list[_Test]:
    """The tests of a row: `{"inputs": [...], "outputs": [...]}`, a JSON list of Python texts, or one such text.

    Raises:
        ValueError: There are none.
    """
    try:
        found = json.loads(answer)
    except ValueError:
        found = [answer] if answer.strip() else []
    if isinstance(found, dict):
        pairs = found.get("inputs"), found.get("outputs")
        if all(isinstance(texts, list) for texts in pairs) and len(pairs[0]) == len(pairs[1]):
            found = [_Test(given=str(given), expected=str(wanted)) for given, wanted in zip(*pairs, strict=True)]
    elif isinstance(found, list) and all(isinstance(text, str) for text in found):
        found = [_Test(text=text) for text in found]
    if not isinstance(found, list) or not found or not all(isinstance(test, _Test) for test in found):
        raise ValueError(f"the row has no tests for code: {answer:.80}")
    return found


def _passes(code: str, test: _Test, deadline: float, parameters: CodeParameters) -> bool:
    Path(_SOLUTION).write_text(code, errors="replace")
    if test.given is not None:
        printed = _printed(["", _SOLUTION], test.given, deadline, parameters)
        return printed is not None and _lines(printed) == _lines(test.expected)
    Path(_TEST).write_text(test.text, errors="replace")
    proof = secrets.token_hex(16)
    printed = _printed([proof, _SOLUTION, _TEST], "", deadline, parameters)
    return printed is not None and printed.endswith(f"{proof}\n")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _printed(arguments: Sequence[str], given: str, deadline: float, parameters: CodeParameters) -> str | None:
    """What a process prints, its end if that is long; None where it fails or has no time left."""
    if (left := deadline - time.monotonic()) <= 0:
        return None
    with Path(_OUTPUT).open("w+b") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _RUNNER, str(parameters.memory_mib * MIB), *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        try:
            process.communicate(given.encode(errors="replace"), timeout=left)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # what it has started may have outlived it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - LONGEST_OUTPUT))
        return output.read().decode(errors="replace") if process.returncode == 0 else None
