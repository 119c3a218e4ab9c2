"""What `specrl bench step` makes of the steps of two trainers, and how it tells processes to take them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from specrl.bench.interleaved.side import TrainStep
from specrl.bench.interleaved.turns import Worker, answers_of
from specrl.bench.job import BenchJob
from specrl.bench.settings import StepSettings
from specrl.bench.step.page import write_page
from specrl.bench.step.results import PeerStep, StepFindings, UpdateProducts
from specrl.config import Config

WORKER = """
import sys
from specrl.bench.interleaved.turns import Turns
turns = Turns()
print("what a library prints")
turns.done()
while turns.wait():
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    del block
    turns.done(step_s=1.5)
if sys.argv[1] == "fails":
    raise SystemExit("no more")
"""


def own_step(step: int, seconds: float) -> TrainStep:
    metrics = {"step": seconds, "generation": 1.0, "policy_update": seconds / 2, "refit": 0.5}
    values = {f"timing/{part}_s": value for part, value in metrics.items()} | {"rollout/response_length_mean": 50.0}
    return TrainStep(step, values, prompts=8, samples=4, peak_gib=4.0, held_gib=3.5, cpu_s=2.0, wall_s=seconds)


FOUND = StepFindings(
    [own_step(1, 10.0), own_step(2, 8.0), own_step(3, 12.0)],
    [PeerStep(seconds, 15.0, seconds - 16.0, 1500, 6.0, 5.0) for seconds in (60.0, 64.0, 66.0)],
    "TRL",
    "1.16.0",
    UpdateProducts(tokens=3000, seconds=3.0, flops_per_s=7e11),
)


def test_the_figures_are_those_of_the_contract() -> None:
    found: dict[str, Any] = FOUND.as_json()
    assert (found["ratio"], found["ratio_min"], found["ratio_max"]) == (6.0, 5.5, 8.0)  # of pairs of steps
    assert found["specrl"] == {"step_s": 10, "generation_s": 1, "update_s": 5, "refit_s": 0.5, "tokens": 1600}
    peer = {"name": "TRL", "version": "1.16.0", "step_s": 64, "generation_s": 15, "update_s": 48, "tokens": 1500}
    assert found["peer"] == peer
    assert [pair["peer"]["step_s"] for pair in found["steps"]] == [60, 64, 66]


def test_the_page_has_the_parts_side_by_side(tmp_path: Path) -> None:
    job = BenchJob("", tmp_path, {}, "specrl bench step --run q", tmp_path / "page.md", tmp_path / "found.json")
    write_page(job, StepSettings(), Config(name="q"), FOUND)
    text = job.page.read_text()
    assert "TRL's step takes 6.00 times as long as specrl's** (5.50 to 8.00 over 3 pairs" in text
    assert "| policy update | 5.00 | 50% | 48.00 | 9.60x |" in text
    assert "of 3000 tokens with each prompt counted once, take 3.00 s at the 700 GFLOP/s" in text
    assert "with 2 threads on such products: 50% of the update." in text
    assert "| refit | 0.50 | 5% | - | - |" in text
    assert "| 0 | 10.0 | 60.0 | 6.00x | 1600 | 1500 | 4.00 (3.50) | 6.00 (5.00) |" in text


@pytest.mark.parametrize(
    ("values", "words"),
    [({"peer_sequences": 5}, "must divide the 32 responses"), ({"threads": 3, "ranks": 2}, "a multiple of ranks = 2")],
)
def test_sizes_that_do_not_fit_are_refused(values: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StepSettings.model_validate(values)


def test_a_process_takes_a_step_when_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "turn_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    log = tmp_path / "log"
    with Worker("worker", ["turn_worker", "ends"], {}, log) as worker:
        ready = worker.answer()
        worker.begin_step()
        taken = worker.answer()
        worker.end()  # the process ends before anybody waits for it
    assert taken["step_s"] == 1.5 and taken["peak_gib"] > ready["held_gib"] + 0.05  # the peak is that of the step
    assert log.read_text() == "what a library prints\n"
    with (
        pytest.raises(RuntimeError, match="worker ended before its step; log: "),
        Worker("worker", ["nothing"], {}, log) as worker,
    ):
        worker.answer()


def test_a_process_that_is_killed_ends_the_wait_for_those_that_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    with (
        pytest.raises(RuntimeError, match=r"second ended before its step \(it was killed, as Linux does"),
        Worker("first", ["waits"], {}, tmp_path / "first.log") as first,
        Worker("second", ["waits"], {}, tmp_path / "second.log") as second,
    ):
        os.kill(second.pid, signal.SIGKILL)
        answers_of([first, second])
