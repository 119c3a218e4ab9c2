"""What the loop leaves on disk, and when; everything around it is made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specrl.config import Config
from specrl.distributed import Ranks
from specrl.loop import Trainer
from specrl.rollout.drafts.acceptance import SourceCounts
from specrl.stages.train_results import precision_report
from specrl.step_record import StepRecord, StepRecorder, read_steps
from specrl.timeline import Bubble, RankTimeline, Timer, rank_spans
from specrl.tracking import Silent


@pytest.mark.parametrize(
    ("step", "is_best", "is_due"), [(0, False, False), (0, True, True), (1, False, True), (2, False, True)]
)
def test_a_step_has_its_record_before_its_checkpoint(tmp_path: Path, step: int, is_best: bool, is_due: bool) -> None:
    """Once there is a checkpoint nobody runs the step again, nor writes its record."""
    ranks = Ranks(0, 1, 0, torch.device("cpu"))
    recorder = StepRecorder(ranks, Silent(), tmp_path / "rollouts", tmp_path / "steps")
    found: list[int] = []
    trainer = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(checkpoint_every=2)),
        is_last=lambda version: version == 3,
        recorder=recorder,
        checkpoints=SimpleNamespace(check=lambda: None),
        save=lambda _: found.extend(item.step for item in read_steps(recorder.steps_dir)),
    )
    bubble = Bubble(0, 100.0, 101.0, 101.0, 5, 0.0)
    record = StepRecord(step, {"timing/step_s": 1.0}, 0, [], [], {}, [RankTimeline(bubble, rank_spans(bubble, []))])
    Trainer.store(cast(Any, trainer), record, [], is_best=is_best)
    assert found == ([step] if is_due else [])


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    ranks = Ranks(0, 1, 0, torch.device("cpu"))
    recorder = StepRecorder(ranks, Silent(), tmp_path / "rollouts", tmp_path / "steps")
    bubble = Bubble(0, 100.0, 101.0, 101.0, 5, 0.0)
    timelines = [RankTimeline(bubble, rank_spans(bubble, []))]
    record = StepRecord(0, {"timing/step_s": 1.0}, 2, [1], [2], {"replay": SourceCounts(2, 9, 4)}, timelines)
    recorder.write(record)
    assert read_steps(recorder.steps_dir) == [record]
    assert isinstance(read_steps(recorder.steps_dir)[0].by_source["replay"], SourceCounts)


def test_a_timer_knows_the_parts_under_way() -> None:
    timer = Timer()
    with timer("step"):
        with timer("generation"):
            pass
        with timer("checkpoint"):
            so_far = timer.seconds
    assert set(so_far) == {"step", "generation", "checkpoint"} == set(timer.seconds)
    assert so_far["step"] <= timer.seconds["step"]
    assert [span.name for span in timer.spans] == ["generation", "checkpoint", "step"]


def test_what_is_not_fp8_is_called_by_the_type_that_it_has() -> None:
    for dtype, name in (("float32", "fp32"), ("bfloat16", "bf16")):
        trainer: Any = SimpleNamespace(
            config=Config.model_validate({"name": "run", "model": {"dtype": dtype}, "precision": {"training": "fp8"}}),
            engine=SimpleNamespace(precision=SimpleNamespace(recipe=None), mode="off"),
            precision=SimpleNamespace(training_mode="emulated"),
        )
        report = precision_report(trainer)
        assert (report.generation, report.training, report.kv_cache) == (name, "fp8", name)
