"""The reward that runs what a response has written, in the sandbox, and what it takes for passed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from specrl.config import ConfigError, DataConfig
from specrl.data.problems import Prompt
from specrl.data.rewards import sandbox
from specrl.data.rewards.code import read_tests, refuse_open_sandbox
from specrl.data.rewards.functions import make_rewards
from specrl.data.rewards.pool import RewardPool, Scores

HELD = sandbox.available()
needs_sandbox = pytest.mark.skipif(bool(HELD.gaps(False)), reason="the kernel has no whole sandbox")
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(2, 2) == 5"])
PRINTS = json.dumps({"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10"]})
NAP = str(20_000_000 + os.getpid())


def data(**settings: Any) -> DataConfig:
    parameters = {"seconds": 4.0, "memory_mib": 512}
    values = {"source": "file", "path": "rows.jsonl", "reward": [{"name": "code", "parameters": parameters}]}
    return DataConfig.model_validate(values | settings)


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    found = RewardPool(data())
    yield found
    found.close()


def scores(pool: RewardPool, responses: list[str], tests: str) -> Scores:
    scoring = pool.begin(pool.config)
    for number, response in enumerate(responses):
        scoring.submit(number, Prompt(number, "Q", [1], tests), response)
    return scoring.wait()


def block(code: str, language: str = "python") -> str:
    return f"I think so:\n```{language}\n{code}\n```\nThat is it."


@needs_sandbox
def test_a_response_earns_the_share_of_the_tests_that_its_last_block_passes(pool: RewardPool) -> None:
    right = "def add(a, b):\n    return a + b"
    responses = [
        block(right),
        block("def add(a, b): return 0") + block(right, ""),
        block(right) + block("def add(a, b): return 5"),
        f"<think>{block(right)}</think> I do not know.",
        right,
        block("def add(a, b) return"),
        block("import numpy\ndef add(a, b): return int(numpy.add(a, b))"),
    ]
    found = scores(pool, responses, ASSERTS)
    assert found.rewards == pytest.approx([2 / 3, 2 / 3, 1 / 3, 0, 0, 0, 2 / 3]) and not found.failures


@needs_sandbox
def test_a_program_is_judged_by_what_it_prints(pool: RewardPool) -> None:
    responses = [
        block("a, b = map(int, input().split())\nprint(a + b)  \n"),
        block("import sys\nprint(sum(map(int, open(0).read().split())))\nsys.exit()"),
        block("print(3)"),
        block("print(sum(map(int, input().split())))\nraise SystemExit(1)"),
    ]
    assert scores(pool, responses, PRINTS).rewards == [1.0, 1.0, 0.5, 0.0]


@needs_sandbox
def test_no_response_passes_by_ending_hanging_or_taking_memory(pool: RewardPool) -> None:
    """One that hangs has nothing left for its other tests, and what it has started ends with it."""
    responses = [
        block("import os\nos._exit(0)"),
        block("raise SystemExit(0)"),
        block(f"import subprocess, time\nsubprocess.Popen(['sleep', '{NAP}'])\ntime.sleep(1000)"),
        block("add = lambda a, b: len(bytearray(2**30))"),
        block("while True: print('x' * 10**6)"),
        block("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"),
    ]
    started = time.monotonic()
    found = scores(pool, responses, json.dumps(["pass", "pass"]))
    assert found.rewards == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]  # a function that is not called takes no memory
    assert [failure.reason[:27] for failure in found.failures] == ["ended its process 2 times ("]
    assert scores(pool, responses[3:4], json.dumps(["add(1, 2)"])).rewards == [0.0]
    assert time.monotonic() - started < 120
    assert not any(NAP in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


@needs_sandbox
def test_code_sees_no_network_and_no_variables_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those of the process that judges it, which knows what a program should print, too."""
    marker = tmp_path / "marker"
    code = f"""
import glob, socket
found = []
for place in glob.glob("/proc/[0-9]*/environ"):
    try:
        found += [place] * (b"WHO=" in open(place, "rb").read())
    except OSError:
        pass
try:
    open({str(marker)!r}, "w")
    found.append("wrote")
except OSError:
    pass
try:
    socket.create_connection(("127.0.0.1", 9), 1)
except ConnectionRefusedError:
    found.append("network")
except OSError:
    pass
"""
    monkeypatch.setenv("WHO", "a-secret-of-the-test")
    pool = RewardPool(data(reward_environment=("WHO",)))
    try:
        assert scores(pool, [block(code)], json.dumps(["assert found == [], found"])).rewards == [1.0]
    finally:
        pool.close()
    assert not marker.exists()


@needs_sandbox
def test_a_row_without_tests_is_a_failure(pool: RewardPool) -> None:
    found = scores(pool, [block("x = 1")], "[]")
    assert found.rewards == [0.0]
    assert [failure.reason for failure in found.failures] == ["raised ValueError: the row has no tests for code: []"]


def test_a_row_may_have_its_tests_in_three_forms() -> None:
    assert len(read_tests(ASSERTS)) == 3 and len(read_tests(PRINTS)) == 2
    [alone] = read_tests("def check(f):\n    assert f(1) == 1\ncheck(f)")
    assert alone == ("def check(f):\n    assert f(1) == 1\ncheck(f)", None)
    for none in ("", "[]", "[1]", "3", "{}", '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": []}'):
        with pytest.raises(ValueError, match=r"^the row has no tests for code: "):
            read_tests(none)


def test_code_is_refused_where_the_kernel_holds_less_than_the_whole_sandbox() -> None:
    refuse_open_sandbox(sandbox.Confinement(True, True, 6, True))
    for missing in ({"namespaces": False, "landlock": 3}, {"filters": False}, {"read_only": False, "landlock": 0}):
        held = replace(sandbox.Confinement(True, True, 6, True), **missing)
        with pytest.raises(ConfigError, match="runs what a model writes, which on this machine could ") as error:
            refuse_open_sandbox(held)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_network": True}, r"^data\.reward_network = true: .* set it to false"),
        ({"reward_timeout_s": 4.0}, r"^data\.reward\.code: seconds = 4: data\.reward_timeout_s must be longer"),
    ],
)
def test_code_that_could_not_be_held_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rewards(data(**settings))
