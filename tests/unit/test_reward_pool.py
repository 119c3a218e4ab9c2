"""Rewards in worker processes, with real processes and rewards that misbehave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from specrl.config import Config, DataConfig, EngineConfig, Resources
from specrl.data.problems import Prompt
from specrl.data.rewards import pool as reward_pool
from specrl.data.rewards.pool import (
    FailureTally,
    RewardError,
    RewardFailure,
    RewardPool,
    Scores,
    describe,
    refuse_failure,
    start_rewards,
)

NAP = str(10_000_000 + os.getpid())
BODY = """
import os, signal, subprocess, sys, time
from pathlib import Path

STRANGE = {"none": {"none": None}, "nan": float("nan"), "inf": float("inf"), "text": "0.5", "list": [1, 2]}
STRANGE["huge"] = 10**400

def score(prompt, response, answer):
    word, _, rest = response.partition(" ")
    if word == "raise":
        raise ValueError("cannot judge this")
    if word == "leave":
        sys.exit(3)
    if word == "hang":
        subprocess.Popen(["sleep", "NAP"])  # shall end with the process that hangs
        time.sleep(1000)
    if word == "wait":
        time.sleep(1000)
    if word == "die":
        os._exit(3)
    if word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "slow":
        time.sleep(0.3)
    if word == "once" and not Path(rest).exists():
        time.sleep(1000)
    if word == "hash":
        return hash(answer) % 1000
    return STRANGE[word] if word in STRANGE else len(response) / 8
"""


OTHER = DataConfig(source="file", path=Path("rows.jsonl"), reward="exact_match")


@pytest.fixture(scope="module", autouse=True)
def module_of_rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "strange_rewards.py").write_text(BODY.replace("NAP", NAP))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def data(**settings: object) -> DataConfig:
    values = {"reward": "strange_rewards:score", "reward_timeout_s": 8.0, "reward_on_failure": -1.0, **settings}
    return DataConfig.model_validate(values)


def score(pool: RewardPool, responses: list[str], section: DataConfig | None = None) -> Scores:
    scoring = pool.begin(section or pool.config)
    for number, response in enumerate(responses):
        scoring.submit(number, Prompt(number, f"prompt {number}", [1], "answer"), response)
    return scoring.wait()


@pytest.fixture(scope="module")
def pool(module_of_rewards: Path) -> Iterator[RewardPool]:
    found = RewardPool(data(), OTHER, data())
    yield found
    found.close()


def test_held_out_sets_have_rewards_of_their_own_in_the_same_processes(pool: RewardPool) -> None:
    assert score(pool, ["Answer: answer", "no"], OTHER).rewards == [1.0, 0.0]


def test_the_order_of_sets_is_the_same_in_all_processes(pool: RewardPool) -> None:
    other = RewardPool(data())
    try:
        assert score(other, ["hash"]).rewards == score(pool, ["hash"]).rewards
    finally:
        other.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "rewards.worker" in " ".join(child.cmdline())]


def forks() -> list[psutil.Process]:
    """Return the processes that score a response at the moment: they have left the folder that the others work in."""
    found = [process for worker in workers() for process in (worker, *worker.children(recursive=True))]
    return [process for process in found if process.cwd() != str(Path.cwd())]


def test_each_failure_costs_its_own_response_alone_and_is_named(
    pool: RewardPool, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {
        "raise": "raised ValueError: cannot judge this",
        "leave": "raised SystemExit: 3",
        "hang": "took longer than data.reward_timeout_s = 8",
        "die": r"ended its process 2 times (exit code 3)",
        "crash": r"ended its process 2 times (signal 11, Segmentation fault)",
        "none": "returned {'none': None}, which is not a finite number",
        "nan": "returned nan, which is not a finite number",
        "inf": "returned inf",
        "text": "returned '0.5'",
        "list": "returned [1, 2]",
        "huge": "returned 1000000",
    }
    responses = [word for kind in bad for word in ("good", kind)]
    scores = score(pool, responses)
    assert scores.rewards == [0.5, -1.0] * len(bad)
    assert [failure.response for failure in scores.failures] == list(bad)
    for failure, reason in zip(scores.failures, bad.values(), strict=True):
        assert failure.reason.startswith(reason)
    assert "raised ValueError: cannot judge this; prompt 'prompt 1', response 'raise'" in caplog.text
    assert "data.reward failed on 8 more responses" in caplog.text


def test_slow_rewards_are_computed_side_by_side_and_come_in_order(pool: RewardPool) -> None:
    score(pool, ["slow"] * 6)  # the first ones start the processes
    scores = score(pool, ["slow", "a", "slow b", "fine", "slow"])
    assert [*scores.rewards[:3], scores.rewards[4]] == [0.5, 0.125, 0.75, 0.5]
    assert scores.failures == []
    assert 1 < len(workers()) <= pool.config.reward_workers


def test_a_process_that_something_else_kills_changes_no_reward(pool: RewardPool, tmp_path: Path) -> None:
    scoring = pool.begin(pool.config)
    scoring.submit(0, Prompt(0, "prompt", [1], "answer"), f"once {tmp_path / 'marker'}")
    wait_until(forks)
    (tmp_path / "marker").touch()
    for fork in forks():
        fork.kill()
    assert scoring.wait().failures == []
    for worker in workers():
        worker.kill()
    assert score(pool, ["good"] * 8).rewards == [0.5] * 8


def test_what_is_sent_to_all_processes_of_a_job_is_not_meant_for_these() -> None:
    """By Slurm and by a terminal."""
    alone = RewardPool(data(reward_workers=1))
    score(alone, ["good"])
    before = family = [process for worker in workers() for process in (worker, *worker.children(recursive=True))]
    for process in family:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(number)
    assert score(alone, ["good"] * 4).rewards == [0.5] * 4
    after = [process for worker in workers() for process in (worker, *worker.children(recursive=True))]
    assert set(before) <= set(after)
    alone.close()


def test_a_reward_that_loses_every_process_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_pool, "LOST_IN_A_ROW", 4)
    pool = RewardPool(data(reward_workers=2, reward_timeout_s=0.05))
    with pytest.raises(RewardError, match="was lost 4 times in a row; the last one took longer than"):
        score(pool, ["hang"] * 100)
    with pytest.raises(RewardError):
        pool.begin(pool.config).submit(0, Prompt(0, "", [], ""), "good")
    pool.close()
    wait_until(lambda: not any(NAP in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])))


def test_a_reward_that_fails_on_every_response_is_refused() -> None:
    failures = [RewardFailure("Q", "A", "raised ValueError: no"), RewardFailure("R", "B", "raised ValueError: no")]
    tally = FailureTally.merge([FailureTally(), FailureTally.of(failures), FailureTally.of(failures[:1])])
    refuse_failure(tally, 4, data())
    assert describe(tally, 4).startswith("the reward failed on 3 of 4 responses: 3 x it raised ValueError: no; the")
    with pytest.raises(RewardError, match="failed on all 3 responses: the first one raised ValueError: no; prompt 'Q'"):
        refuse_failure(tally, 3, data())


def test_a_pool_is_closed_at_once_whatever_it_is_doing() -> None:
    before = len(workers())
    RewardPool(data()).close()
    busy = RewardPool(data(reward_timeout_s=1000))
    scoring = busy.begin(busy.config)
    for number in range(40):
        scoring.submit(number, Prompt(number, "", [], ""), "wait")
    busy.close()
    assert len(workers()) == before


def test_only_the_first_rank_of_an_engine_scores() -> None:
    config = Config(name="x", engine=EngineConfig(tensor_parallel=2), resources=Resources(ranks_per_node=2))
    assert start_rewards(config, 1) is None


def test_a_reward_that_cannot_be_imported_in_the_process_is_one_line() -> None:
    pool = RewardPool(data(reward="no.such.module:score"))
    with pytest.raises(RewardError, match=r'^data\.reward = "no\.such\.module:score" cannot be imported') as error:
        score(pool, ["good"])
    assert "\n" not in str(error.value)
    pool.close()


RANK = """
from specrl.config import Config, DataConfig, EngineConfig, Resources
from specrl.data.rewards import pool as reward_pool
from specrl.data.problems import Prompt
from specrl.data.rewards.pool import RewardPool
data = DataConfig(reward="strange_rewards:score")
scoring = RewardPool(data).begin(data)
for number in range(3):
    scoring.submit(number, Prompt(number, "", [], ""), "wait" if number else "good")
scoring.wait()
"""


def test_the_processes_end_with_their_rank_however_it_ends(module_of_rewards: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{module_of_rewards}:{Path(__file__).parents[2]}"}
    rank = subprocess.Popen([sys.executable, "-c", RANK], env=environment)
    wait_until(lambda: len(psutil.Process(rank.pid).children()) >= 2)
    children = psutil.Process(rank.pid).children()
    rank.kill()
    rank.wait()
    wait_until(lambda: not any(map(alive, children)))


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
