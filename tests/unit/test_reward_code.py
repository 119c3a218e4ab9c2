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

from specrl.config import Config, ConfigError, DataConfig
from specrl.data.problems import Prompt
from specrl.data.rewards import sandbox
from specrl.data.rewards.code import read_tests, refuse_open_sandbox
from specrl.data.rewards.functions import make_rewards
from specrl.data.rewards.pool import RewardPool, Scores
from specrl.data.rewards.trial import doubtful_references

HELD = sandbox.available()
needs_sandbox = pytest.mark.skipif(bool(HELD.gaps(False)), reason="the kernel has no whole sandbox")
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(2, 2) == 5"])
PRINTS = json.dumps({"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10"]})
CODE = 'data.reward = "code"'
NAP = str(20_000_000 + os.getpid())
OUTLIVING = """
import glob, os, time
if not os.fork():
    os.setsid()
    open("started", "w").close()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for place in glob.glob("/proc/[0-9]*/environ"):
            try:
                if b"WHO=" in open(place, "rb").read():
                    open("seen", "w").close()
            except OSError:
                pass
        time.sleep(0.02)
    os._exit(0)
while not os.path.exists("started"):
    time.sleep(0.01)
"""
LATER = """
import time
from pathlib import Path

def seen(prompt, response, answer):
    time.sleep(1)
    return float(Path("started").exists() and Path("seen").exists())
"""


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
def test_what_a_test_leaves_behind_does_not_see_the_parts_that_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later_rewards.py").write_text(LATER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHO", "a-secret-of-the-test")
    pool = RewardPool(data(reward=[{"name": "code"}, {"name": "later_rewards:seen"}], reward_environment=("WHO",)))
    try:
        found = scores(pool, [block(OUTLIVING)], json.dumps(["pass"]))
    finally:
        pool.close()
    assert found.parts == [[1.0, 0.0]] and not found.failures


@needs_sandbox
def test_a_test_that_cannot_be_started_is_not_passed(pool: RewardPool) -> None:
    responses = [
        block("import os\ntry:\n    while os.fork() or os._exit(0): pass\nexcept OSError: pass"),
        *(block(f"import os\nos.unlink('{name}')\nos.mkdir('{name}')") for name in ("solution.py", "output")),
    ]
    found = scores(pool, responses, json.dumps({"inputs": ["", ""], "outputs": ["", ""]}))
    assert found.rewards == [0.5, 0.5, 0.5] and not found.failures


@needs_sandbox
def test_a_pipe_in_the_place_of_a_file_keeps_no_test_waiting(pool: RewardPool) -> None:
    response = block("import os\nos.unlink('solution.py')\nos.mkfifo('solution.py')")
    found = scores(pool, [response], json.dumps({"inputs": ["", ""], "outputs": ["", ""]}))
    assert found.rewards == [1.0] and not found.failures


@needs_sandbox
def test_a_block_in_a_list_is_read_without_its_indentation(pool: RewardPool) -> None:
    indented = "".join(f"   {line}\n" for line in ("```python", "def add(a, b):", "    return a + b", "```"))
    assert scores(pool, [f"1. So:\n\n{indented}"], ASSERTS).rewards == pytest.approx([2 / 3])


@needs_sandbox
def test_a_program_may_take_all_the_memory_that_can_be_asked_for() -> None:
    pool = RewardPool(data(reward=[{"name": "code", "parameters": {"memory_mib": 4096}}]))
    try:
        assert scores(pool, [block("print(3)")], json.dumps({"inputs": [""], "outputs": ["3"]})).rewards == [1.0]
    finally:
        pool.close()


@needs_sandbox
def test_rows_whose_tests_cannot_be_used_are_counted_before_a_run() -> None:
    """For code, what a failure counts as is what a reference earns."""
    config = Config.model_validate({"name": "x", "data": data().model_dump()})
    rows = [ASSERTS, '{"a": 1}', '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}']
    found = [(Prompt(0, str(number), [], row), f"Answer: {row}") for number, row in enumerate(rows)]
    [line] = doubtful_references(config, found)
    assert "failed on 2 of 3 responses: 1 x it raised ValueError: the row " in line and "\n" not in line
    assert doubtful_references(config, found[:1]) == []


@needs_sandbox
def test_a_row_without_tests_is_a_failure(pool: RewardPool) -> None:
    found = scores(pool, [block("x = 1")], "[]")
    assert found.rewards == [0.0]
    assert [failure.reason for failure in found.failures] == ["raised ValueError: the row has no tests for code: []"]


def test_a_row_may_have_its_tests_in_three_forms() -> None:
    assert len(read_tests(ASSERTS)) == 3 and len(read_tests(PRINTS)) == 2
    inputs, outputs = json.loads(PRINTS).values()
    each = [{"input": i, "output": o, "metadata": {"func_name": None}} for i, o in zip(inputs, outputs, strict=True)]
    assert read_tests(json.dumps(each)) == read_tests(PRINTS)
    [alone] = read_tests("def check(f):\n    assert f(1) == 1\ncheck(f)")
    assert alone == ("def check(f):\n    assert f(1) == 1\ncheck(f)", None)
    for none in ("", "[]", "[1]", "3", "{}", '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": []}'):
        with pytest.raises(ValueError, match=r"^the row has no tests for code: "):
            read_tests(none)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, r"^the row tests a function by values \(fn_name\)"),
        ({"fn_name": "add", "inputs": ["1"], "outputs": ["3"]}, r"^the row tests a function by values \(fn_name\)"),
        ([{"input": "1", "output": "3", "testtype": "functional"}], r"^the row tests a function by values \(fn_name\)"),
        ([{"input": "1", "output": "3", "fn_name": "add"}], r"^the row tests a function by values \(fn_name\)"),
        (
            [{"input": "1", "output": "3", "metadata": {"func_name": "add"}}],
            r"^the row tests a function by values \(fn_name\)",
        ),
        ([{"stdin": "1", "stdout": "3"}], r"^the row has no tests for code: its inputs and outputs must be .* texts$"),
        ({"inputs": [1], "outputs": [3]}, r"^the row has no tests for code: its inputs and outputs must be .* texts$"),
        (
            ["def check(candidate):\n    assert candidate(1) == 1"],
            r"define check and never call it: end them with a call",
        ),
        (["pass"] * 201, r"^the row has 201 tests for code, and at most 200 are allowed$"),
    ],
)
def test_tests_that_cannot_be_run_are_refused_in_one_line(row: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_tests(json.dumps(row))
    assert len(str(error.value)) <= 120  # and nothing of it is left out where it is shown
    assert len(read_tests(json.dumps(["pass"] * 200))) == 200


def test_code_is_refused_where_the_kernel_holds_less_than_the_whole_sandbox() -> None:
    refuse_open_sandbox(sandbox.Confinement(True, True, 6, True), CODE)
    refuse_open_sandbox(sandbox.Confinement(False, False, 0, False), "")
    for missing in ({"namespaces": False, "landlock": 3}, {"filters": False}, {"read_only": False, "landlock": 0}):
        held = replace(sandbox.Confinement(True, True, 6, True), **missing)
        with pytest.raises(ConfigError, match="runs what a model writes, which on this machine could ") as error:
            refuse_open_sandbox(held, CODE)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_network": True}, r"^data\.reward_network = true: .* set it to false"),
        ({"reward_timeout_s": 4.0}, r"^data\.reward\.code: seconds = 4: data\.reward_timeout_s must be longer"),
        (
            {"reward": [{"name": "code", "parameters": {"memory_mib": 4097}}]},
            r"^data\.reward\.code\.memory_mib .*4096",
        ),
    ],
)
def test_code_that_could_not_be_held_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rewards(data(**settings))
