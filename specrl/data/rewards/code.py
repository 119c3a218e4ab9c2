"""The reward `code`: runs a response's program against the tests of its row, in the rewards' sandbox."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Self, TypeGuard, cast

from pydantic import Field, ValidationInfo, model_validator

from specrl.config import ConfigError, DataConfig
from specrl.config.algorithms import Options
from specrl.config.base import PositiveFloat
from specrl.data.rewards.sandbox import MEMORY, PROCESSES, Confinement, hide_memory, limit_reading

MIB = 2**20
LONGEST_OUTPUT = MIB  # bytes of a program's output that are compared
ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # so that sets keep their order after a restart
}
"""The environment of the programs."""
BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
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
"""Runs a solution and perhaps a test, then prints `proof`, without which no Python test passes.

A solution that merely ends the process does not print it. One that searches for it can find it in its own process:
Python tests trust the solution. Input/output tests do not: the expected output never enters the process.
"""
_SOLUTION, _TEST, _OUTPUT = "solution.py", "test.py", "output"


class CodeParameters(Options):
    """The parameters of `code`."""

    seconds: PositiveFloat = 10.0
    """The time for all tests of a response; tests that have not ended by then count as failed."""
    memory_mib: Annotated[int, Field(gt=0, le=MEMORY // MIB)] = 1024
    """The address space of a test, within that of the whole scoring."""

    @model_validator(mode="after")
    def _is_held(self, info: ValidationInfo) -> Self:
        data = cast(DataConfig, info.context)
        if self.seconds >= data.reward_timeout_s:
            raise ValueError(f"seconds = {self.seconds:g}: data.reward_timeout_s must be longer")
        return self


def refuse_open_sandbox(held: Confinement, named: str) -> None:
    """Raise ConfigError if the setting `named` runs code although the kernel lacks a part of the sandbox."""
    if named and (gaps := held.gaps(network=False)):
        raise ConfigError(
            f"{named} runs what a model writes, which on this machine could {gaps}: run it where `specrl doctor` finds "
            "a whole sandbox"
        )


def run_tests(_: str, response: str, answer: str, parameters: CodeParameters) -> float:
    """The share of tests in `answer` that the response's last fenced block passes; 0 without a block.

    The caller must be in the sandbox, in an empty writable folder.
    """
    tests = read_tests(answer)
    codes = [textwrap.dedent(block) for block in BLOCK.findall(response)[-1:]]
    deadline = time.monotonic() + parameters.seconds
    # This memory holds the expected output and the variables of `data.reward_environment`. It stays hidden for the
    # following parts of the reward, because a process in its own session outlives its test.
    hide_memory()
    return sum(_passes(code, *test, deadline, parameters) for code in codes for test in tests) / len(tests)


def read_tests(answer: str) -> list[tuple[str, str | None]]:
    """The tests of a row: Python code that must not raise, or a program's input with its expected output.

    Given as a text, a JSON list of texts, or `{"inputs": [...], "outputs": [...]}` of texts, also as a list of objects
    with `input` and `output`; ValueError if there are none, or more than the allowed number of processes.
    """
    try:
        found = json.loads(answer)
    except ValueError:
        found = [answer] if answer.strip() else None
    if isinstance(found, list) and found and all(isinstance(test, dict) for test in found):  # LiveCodeBench's form
        kinds = {str(test.get("testtype") or test.get("type")) for test in found}
        named = kinds & {"functional", "function_call"} or any(map(_names_function, found))
        found = {f"{name}s": [test.get(name) for test in found] for name in ("input", "output")} | {"fn_name": named}
    tests: list[tuple[str, str | None]] = []
    if isinstance(found, dict):
        tests = _of_programs(found)
    elif _are_texts(found):
        tests = [(text, None) for text in found]
    if not tests:
        raise ValueError(f"the row has no tests for code: {answer:.80}")
    if any(test.count("check(") == 1 and "def check(" in test for test, wanted in tests if wanted is None):
        raise ValueError("the row's tests define check and never call it: end them with a call, as check(NAME)")
    if len(tests) > PROCESSES:
        raise ValueError(f"the row has {len(tests)} tests for code, and at most {PROCESSES} are allowed")
    return tests


def _of_programs(found: dict[str, object]) -> list[tuple[str, str | None]]:
    if _names_function(found):  # in TACO and APPS, some inputs and outputs are a function's arguments and results
        raise ValueError("the row tests a function by values (fn_name), which code does not: write it as Python tests")
    given, wanted = found.get("inputs"), found.get("outputs")
    if not (_are_texts(given) and _are_texts(wanted) and len(given) == len(wanted)):
        raise ValueError("the row has no tests for code: its inputs and outputs must be equally many texts")
    return list(zip(given, wanted, strict=True))


def _names_function(test: dict[str, object]) -> bool:
    about = test.get("metadata")
    return bool(test.get("fn_name") or (isinstance(about, dict) and about.get("func_name")))


def _are_texts(found: object) -> TypeGuard[list[str]]:
    return isinstance(found, list) and all(isinstance(text, str) for text in found)


def _passes(code: str, test: str, wanted: str | None, deadline: float, parameters: CodeParameters) -> bool:
    """Whether code passes a test: raises nothing, or prints the expected output."""
    proof, memory = secrets.token_hex(16), parameters.memory_mib
    try:
        write(_SOLUTION, code)
        if wanted is not None:
            found = printed(_RUNNER, ["", _SOLUTION], test, deadline, memory)
            return found is not None and _lines(found) == _lines(wanted)
        write(_TEST, test)
        found = printed(_RUNNER, [proof, _SOLUTION, _TEST], "", deadline, memory)
        return found is not None and found.endswith(f"{proof}\n")
    except OSError:  # earlier tests may have used up processes or disk, or replaced the file by a folder
        return False


def write(name: str, text: str) -> None:
    Path(name).unlink(missing_ok=True)  # an earlier test may have replaced it by a pipe, on which writing would block
    Path(name).write_text(text, errors="replace")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def printed(runner: str, arguments: Sequence[str], given: str, deadline: float, memory_mib: int) -> str | None:
    """The output of a process, or its end if it is long; None if it fails or runs out of time.

    The program `runner` receives its memory limit in bytes and the arguments, and limits itself.
    """
    if (left := deadline - time.monotonic()) <= 0:
        return None
    with Path(_OUTPUT).open("w+b") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-B", "-c", runner, str(memory_mib * MIB), *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            preexec_fn=limit_reading,  # noqa: PLW1509  (this process has one thread)
            env=ENVIRONMENT,
            start_new_session=True,
        )
        try:
            process.communicate(given.encode(errors="replace"), timeout=left)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # its children may have outlived it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - LONGEST_OUTPUT))
        return output.read().decode(errors="replace") if process.returncode == 0 else None
