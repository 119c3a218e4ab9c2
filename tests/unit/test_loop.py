"""What the loop leaves on disk, and when; everything around it is made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specrl.config import Config, parse_config
from specrl.data.rewards.pool import FailureTally
from specrl.distributed import Ranks
from specrl.events import drop_events, read_events, record_event
from specrl.loop import Trainer
from specrl.progress import Progress
from specrl.rollout.drafts.acceptance import SourceCounts, SpeculationStats
from specrl.stages.train import load_best, precision_report
from specrl.step_record import OF_STEPS, StepRecord, StepRecorder, read_steps
from specrl.timeline import Bubble, RankTimeline, Timer, rank_spans
from specrl.tracking.log import Log
from specrl.tracking.tracker import Tracker
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.checkpoint.load import TrainState
from tests.unit.test_checkpoint import ToyPolicy, flip

ALONE = Ranks(0, 1, 0, torch.device("cpu"))
LATE = {"timing/step_s": 1.0, "timing/checkpoint_s": 0.25}
REPORTED: dict[str, float] = {"reward/mean": 0.5, "spec/acceptance_length": 2.0}


def logged(folder: Path) -> list[tuple[int, dict[str, float]]]:
    found = [entry.values for entry in Log(folder).entries() if entry.kind == "metrics"]
    return [(values["step"], values["metrics"]) for values in found]


def record_of(step: int, metrics: Mapping[str, float] = {"reward/mean": 0.5}, events: Sequence[str] = ()) -> StepRecord:
    bubble = Bubble(0, 100.0, 101.0)
    timelines = [RankTimeline(bubble, rank_spans(bubble, []))]
    return StepRecord(step, {**metrics, **LATE}, SpeculationStats(), timelines, list(events))


def run_steps(stage_dir: Path, steps: range, first_step: int, progress: Progress) -> list[tuple[int, str]]:
    """A start of the stage that goes on from `first_step`; the steps and the names that it logs."""
    before = len(logged(stage_dir))
    recorder = StepRecorder(ALONE, Tracker(Log(stage_dir)), stage_dir / "rollouts", stage_dir / "steps")
    recorder.drop_from(first_step)
    for step in steps:
        record, timer = record_of(step, REPORTED, ["collapsed"]), Timer()
        recorder.report(record, cast(Any, SimpleNamespace(failures=FailureTally())))
        if step % 2:
            recorder.log_early(record)  # as a step with a checkpoint does
            recorder.write(record)
        recorder.finish(record, timer, 4, progress)
    return [(step, name) for step, metrics in logged(stage_dir)[before:] for name in sorted(metrics)]


def test_what_is_run_again_is_not_logged_again(tmp_path: Path) -> None:
    names = sorted([*REPORTED, *LATE])
    with Progress(tmp_path, enabled=False) as progress:
        found = run_steps(tmp_path, range(3), 0, progress)
        assert sorted(found) == [(step, name) for step in range(3) for name in names]
        record_event(tmp_path, "restart", "killed", 2)
        assert run_steps(tmp_path, range(1, 2), 1, progress) == []
        assert run_steps(tmp_path, range(1, 4), 1, progress) == [
            (3, name) for name in [*sorted(REPORTED), *sorted(LATE)]
        ]
    events = [(event.kind, event.step) for event in read_events(tmp_path)]
    assert events == [("drafter", 0), ("restart", 2), ("drafter", 1), ("drafter", 2), ("drafter", 3)]


def test_a_boundary_knows_how_long_the_last_checkpoint_took_that_is_whole() -> None:
    said: list[float] = []
    trainer = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(num_steps=2, trace_steps=())),
        recorder=SimpleNamespace(steps_dir=Path("none"), recent_seconds=lambda _: ([], [])),
        refit_engine=lambda version: SimpleNamespace(timing=dict),
        is_last=lambda version: version == 2,
        ranks=ALONE,
        validation=SimpleNamespace(is_due=lambda *_, last: False),
        checkpoints=SimpleNamespace(seconds=7.0, wait=lambda: None),
        lifetime=SimpleNamespace(
            begin_steps=lambda *_: None,
            saved=said.append,
            at_boundary=lambda *_, validates: said.append(-1.0),
            end_steps=lambda: None,
        ),
    )
    trainer.step = lambda step, _: setattr(trainer.checkpoints, "seconds", 9.0)
    assert Trainer.run(cast(Any, trainer), 0, cast(Any, None)) == 2
    assert said == [7.0, -1.0, 9.0, -1.0]


def test_a_damaged_best_checkpoint_is_told_of_and_the_next_best_is_taken(tmp_path: Path) -> None:
    policy = ToyPolicy()
    checkpoints = Checkpoints(tmp_path / "checkpoints", policy, Retention(3))
    for step in (1, 2, 3):
        checkpoints.save(TrainState(step, policy, None))
        checkpoints.wait()
    values = {1: 0.5, 2: 0.9, 3: 0.7}
    scores = SimpleNamespace(
        best=lambda among: max(
            ((step, values[step]) for step in among if step in values), key=lambda b: b[1], default=None
        )
    )

    def best_of(last: int) -> tuple[int, float] | None:
        trainer = SimpleNamespace(
            ranks=ALONE,
            validation=scores,
            policy=ToyPolicy(),
            drafter=None,
            engine=SimpleNamespace(precision=SimpleNamespace(restore=lambda _: None)),
        )
        return load_best(tmp_path, cast(Any, trainer), last)

    flip(tmp_path / "checkpoints" / "step=000002" / "policy-00000.safetensors")
    assert best_of(4) == (3, 0.7)
    (event,) = read_events(tmp_path)
    assert (event.kind, event.step) == ("checkpoint", 2) and "wrong checksum" in event.text
    for step in (1, 3):
        flip(tmp_path / "checkpoints" / f"step=00000{step}" / "policy-00000.safetensors")
    assert best_of(4) is None
    assert best_of(1) == (1, 0.5)  # the trainer holds it


def test_a_checkpoint_holds_a_drafter_that_was_probed_and_tells_of_one_that_was_replaced(tmp_path: Path) -> None:
    drafters, events, policy = ["ruined"], list[str](), ToyPolicy()

    def confirm(version: int) -> None:
        drafters.append("good")
        events.append(f"drafter collapse after refit {version}")

    trainer = SimpleNamespace(
        ranks=ALONE,
        refit=SimpleNamespace(guard=SimpleNamespace(confirm=confirm, take_events=lambda: events)),
        policy=policy,
        drafter=SimpleNamespace(state_dict=lambda: drafters[-1]),
        engine=SimpleNamespace(precision=SimpleNamespace(kv_scales=None)),
        checkpoints=SimpleNamespace(
            directory=tmp_path / "checkpoints",
            save=lambda saved: found.append((saved.step, saved.drafter.state_dict())),
        ),
    )
    found: list[tuple[Any, ...]] = []
    Trainer.save(cast(Any, trainer), 4)
    assert found == [(4, "good")]
    drop_events(tmp_path, OF_STEPS, 4)  # as the next job does, which goes on with the good one
    assert [(event.kind, event.step, event.text) for event in read_events(tmp_path)] == [("drafter", 3, events[0])]


def test_the_drafter_is_probed_before_a_checkpoint_and_every_few_steps() -> None:
    probed: list[int] = []

    def load(version: int, kv_scales: Any, *, probe: bool) -> Any:
        probed.extend([version] * probe)
        return {"refit/speculating": 1.0}

    trainer = SimpleNamespace(
        config=parse_config({"name": "run", "refit": {"probe_every": 4}, "train": {"checkpoint_every": 5}}),
        drafter=object(),
        refit=SimpleNamespace(load=load),
        may_save=lambda version: version % 5 == 0,
    )
    for version in range(1, 13):
        Trainer.refit_engine(cast(Any, trainer), version)
    assert probed == [4, 5, 8, 10, 12]


@pytest.mark.parametrize(
    ("step", "is_best", "is_due"), [(0, False, False), (0, True, True), (1, False, True), (2, False, True)]
)
def test_a_step_has_its_record_before_its_checkpoint(tmp_path: Path, step: int, is_best: bool, is_due: bool) -> None:
    """Once there is a checkpoint nobody runs the step again, nor writes its record."""
    found: list[int] = []
    recorder = StepRecorder(ALONE, Tracker(Log(tmp_path)), tmp_path / "rollouts", tmp_path / "steps")
    trainer = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(checkpoint_every=2)),
        is_last=lambda version: version == 3,
        recorder=recorder,
        checkpoints=SimpleNamespace(check=lambda: None),
        save=lambda _: found.extend(item.step for item in read_steps(recorder.steps_dir)),
    )
    trainer.is_due = lambda version: Trainer.is_due(cast(Any, trainer), version)
    Trainer.store(cast(Any, trainer), record_of(step), [], is_best=is_best)
    assert found == ([step] if is_due else [])
    assert logged(tmp_path) == ([(step, {"reward/mean": 0.5})] if is_due else [])


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    ranks = Ranks(0, 1, 0, torch.device("cpu"))
    recorder = StepRecorder(ranks, Tracker(), tmp_path / "rollouts", tmp_path / "steps")
    bubble = Bubble(0, 100.0, 101.0)
    timelines = [RankTimeline(bubble, rank_spans(bubble, []))]
    stats = SpeculationStats(2, 9, 4, (1,), 3, (2,), {"replay": SourceCounts(2, 9, 4)})
    record = StepRecord(0, {"timing/step_s": 1.0}, stats, timelines)
    recorder.write(record)
    assert read_steps(recorder.steps_dir) == [record]
    assert isinstance(read_steps(recorder.steps_dir)[0].stats.by_source["replay"], SourceCounts)


def test_all_ranks_know_how_long_earlier_steps_and_validations_took(tmp_path: Path) -> None:
    shared: list[Any] = []

    def recent(rank: int) -> tuple[list[float], list[float]]:
        ranks: Any = SimpleNamespace(is_first=rank == 0, gather=lambda own: [*shared, own], barrier=lambda: None)
        recorder = StepRecorder(ranks, Tracker(), tmp_path / "rollouts", tmp_path / "steps")
        recorder.drop_from(1)
        return recorder.recent_seconds(5)

    validated = record_of(0, {"timing/validation_s": 0.75})
    StepRecorder(ALONE, Tracker(), tmp_path / "rollouts", tmp_path / "steps").write(validated)
    shared.append(recent(0))
    assert shared == [([0.25], [0.75])]
    assert recent(1) == shared[0]


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
