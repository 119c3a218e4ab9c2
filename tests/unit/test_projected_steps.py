"""Whole steps of a finished run, simulated with costs measured in other steps."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.folder import write_config
from specrl.config import Config, ConfigError, parse_config
from specrl.models.shapes import KNOWN_SHAPES, model_shape
from specrl.projection.measured import MeasuredRun, read_run, typical_drafts
from specrl.projection.steps.arithmetic import training_flops, update_bytes
from specrl.projection.steps.comparison import RunSteps, causes, gaps, halves, transferred
from specrl.projection.steps.constants import Constants, Means, RowCost, above, calibrate
from specrl.projection.steps.work import MeasuredStep, engine_bytes, measured_step
from specrl.projection.tail import DecodingSpeed, IterationCurve, SimulatedResponse, decode
from specrl.schemas import Rollout, rollout_path, write_rollouts


def make_config(runs_dir: Path = Path("runs"), **train: Any) -> Config:
    settings = {"num_steps": 12, "prompts_per_step": 2, "samples_per_prompt": 2, "checkpoint_every": 4, **train}
    data: dict[str, Any] = {"name": "synthetic", "runs_dir": str(runs_dir), "train": settings}
    data["model"] = {"source": "tiny", "tiny": {"num_layers": 6, "hidden_size": 128, "intermediate_size": 256}}
    return parse_config(data)


SHAPE = model_shape(make_config().model)
TRUE = Constants(
    curve=RowCost(0.02, 0.001),
    gathering_s=0.1,
    writing_s=2.0,
    byte_s=0.02 / engine_bytes(make_config(), SHAPE),
    flop_s=1e-8,
    drafter_s=(0.05, 1e-8),
    merge_s=0.03,
    refit=Means(1.2, 0.5),
    checkpoint=Means(0.15, 0.01),
)
"""The costs by which the steps of these tests take their time."""


def make_rollouts(step: int, rank: int, *, signal: bool = True) -> list[Rollout]:
    """Two responses to a prompt, longer in later steps; half of their tokens were accepted drafts."""
    rows = []
    for sample in range(2):
        length = 20 + 12 * step + 10 * sample + 6 * rank
        row = Rollout(step, rank, rank, sample, step, step, 0, [1] * 5, [2] * length, [0.0] * length, "", "", "stop")
        row.num_draft_tokens, row.num_accepted_tokens = length, length // 2
        row.advantage = (-1.0) ** sample if signal else 0.0
        rows.append(row)
    return rows


def make_record(step: int, engines: list[list[Rollout]], seconds: dict[str, float] | None = None) -> dict[str, Any]:
    """The record of a step whose engines took the time of `TRUE`, and whose parts took `seconds`."""
    ranks, longest = [], 0.0
    for rows in engines:
        needs = sorted(len(row.response_tokens) - row.num_accepted_tokens for row in rows)
        drafts = sum(row.num_draft_tokens for row in rows)
        own_s = 0.02 * needs[-1] + 0.001 * (sum(needs) + drafts)
        longest = max(longest, own_s)
        pace = [[2, needs[0], 1.0], [1, needs[1] - needs[0] - 1, 1.0]]
        bubble = {"started_at": 100.0, "generated_at": 100.0 + own_s, "pace": pace, "drafter_steps": step % 3}
        ranks.append({"bubble": {**bubble, "pregenerated_tokens": 0}})
    metrics = {f"timing/{part}_s": value for part, value in (seconds or {}).items()}
    metrics = {"timing/step_s": sum(metrics.values()), "timing/generation_s": longest, **metrics}
    metrics |= {"spec/decode_steps": 1.0, "bubble/idle_s": 0.0}
    if step % 2:
        metrics["refit/probe_acceptance_length"] = 3.0
    return {"step": step, "metrics": metrics, "ranks": ranks, "by_source": {}}


def make_step(step: int, config: Config) -> tuple[MeasuredStep, dict[str, Any]]:
    """A step that took as long as `TRUE` says, and its record."""
    engines = [make_rollouts(step, rank, signal=step != 5) for rank in range(2)]
    record = make_record(step, engines)
    slowest = record["metrics"]["timing/generation_s"]
    seconds = TRUE.parts(measured_step(record, engines, config, SHAPE).work, slowest)
    record = make_record(step, engines, seconds)
    return measured_step(record, engines, config, SHAPE), record


def make_run(steps: int = 12, **train: Any) -> RunSteps:
    config = make_config(**train)
    found = [make_step(step, config)[0] for step in range(steps)]
    shares = [[simulated(make_rollouts(step, rank)) for rank in range(2)] for step in range(steps)]
    speed = DecodingSpeed(IterationCurve(((1, 1.0),)), 5.0)
    generation = MeasuredRun(shares, speed, False, [], [], [])
    return RunSteps("synthetic", config, found, generation, engine_bytes(config, SHAPE), 2.0)


def simulated(rollouts: list[Rollout]) -> list[SimulatedResponse]:
    found = []
    for row in rollouts:
        length = len(row.response_tokens)
        iterations = length - row.num_accepted_tokens
        found.append(SimulatedResponse(row.prompt_id, length, length, length / iterations, 1.0, length / iterations))
    return found


def test_the_work_of_a_step_is_counted_from_its_record_and_its_rollouts() -> None:
    config = make_config()
    step, _ = make_step(4, config)
    lengths = [68, 78, 74, 84]
    assert step.work.trained_tokens == 2 * 5 + sum(lengths)  # each prompt once
    products = training_flops(SHAPE, 2 * 5 + sum(lengths), sum(lengths)) / 2  # divided between two ranks
    assert products < step.work.update_flops < 1.1 * products  # attention comes to it
    assert step.work.update_bytes == update_bytes(SHAPE, 1, 1)
    assert [(item.iterations, item.rows) for item in step.engines] == [(39, 73 + 146), (42, 79 + 158)]
    assert (step.work.beside_checkpoint, step.work.saves) == (True, False)
    assert [make_step(number, config)[0].work.saves for number in (2, 3, 11)] == [False, True, True]
    assert (step.work.probes, step.work.merges) == (False, True)
    without = make_step(5, config)[0]
    assert (without.work.trained_tokens, without.work.update_flops) == (0, 0.0)
    assert without.work.update_bytes == step.work.update_bytes  # the optimizer and an empty pass


def test_more_updates_and_passes_of_the_trainer_are_counted() -> None:
    once, work = (make_step(1, make_config(**train))[0].work for train in ({}, {"updates_per_step": 2, "kl_coef": 0.1}))
    assert work.update_flops == pytest.approx(once.update_flops * 5 / 3)
    assert work.update_bytes == 2 * once.update_bytes


def test_of_the_experts_only_those_of_a_token_are_computed() -> None:
    shape = KNOWN_SHAPES["Qwen/Qwen3-30B-A3B"]
    active = shape.active_parameters - 2 * shape.embedding_parameters
    assert training_flops(shape, 100, 0) == pytest.approx(600 * active, rel=0.01)


def test_calibration_finds_the_costs_by_which_steps_took_their_time() -> None:
    run = make_run()
    found = calibrate(run.steps, run.weight_bytes, writing_s=9.0)
    assert (found.curve.iteration_s, found.curve.row_s) == (pytest.approx(0.02), pytest.approx(0.001))
    assert found.byte_s == pytest.approx(TRUE.byte_s) and found.flop_s == pytest.approx(TRUE.flop_s)
    assert found.drafter_s == (pytest.approx(0.05), pytest.approx(1e-8))
    assert found.merge_s == pytest.approx(0.03)
    assert (found.refit.with_it, found.refit.without) == (pytest.approx(1.2), pytest.approx(0.5))
    assert found.writing_s == pytest.approx(2.0)
    assert calibrate(run.steps[:4], run.weight_bytes, writing_s=9.0).writing_s == 9.0  # none began beside a checkpoint


def test_each_half_of_a_run_is_simulated_with_costs_of_the_other() -> None:
    parts = {part.part: part for part in halves(make_run())}
    assert abs(parts["step"].error) < 0.02 and parts["step"].step_error < 0.05
    assert parts["step"].simulated == pytest.approx(
        [sum(part.simulated[step] for part in parts.values()) - parts["step"].simulated[step] for step in range(12)]
    )


def test_no_step_is_simulated_with_its_own_seconds() -> None:
    run = make_run()
    changed = [replace(step, seconds={part: 9 * value for part, value in step.seconds.items()}) for step in run.steps]
    engines = [
        replace(step, engines=tuple(replace(item, seconds=9 * item.seconds) for item in step.engines))
        for step in changed
    ]
    slower = replace(run, steps=[*run.steps[:6], *engines[6:]])
    usual, other = ({part.part: part.simulated for part in halves(item)} for item in (run, slower))
    for part, seconds in usual.items():
        assert other[part][6:] == seconds[6:]
        assert other[part][:6] != seconds[:6]


def test_a_run_with_few_steps_is_not_divided() -> None:
    with pytest.raises(ValueError, match="from 4 steps on: the run has 3"):
        halves(make_run(3))


def test_another_run_calibrates_what_it_has_measured() -> None:
    run, other = make_run(), make_run(8, samples_per_prompt=3)
    assert abs(transferred(run, other)[-1].error) < 0.02
    even = replace(other, steps=[step for step in other.steps if step.work.step % 2 and not step.work.merges])
    assert gaps(run.steps, even.constants(even.steps)) == [
        "not measured by the run that calibrates: a refit without the drafter's probe",
        "not measured by the run that calibrates: a merge of drafters trained in idle time",
    ]
    larger = replace(other, config=parse_config({"name": "larger", "model": {"source": "smollm2-135m"}}))
    with pytest.raises(ValueError, match=r"cannot calibrate synthetic: model\.source is smollm2-135m, not tiny"):
        transferred(run, larger)


def test_the_steps_of_a_difference_are_named_with_what_is_known_of_them() -> None:
    run = make_run()
    (part,) = [item for item in halves(run) if item.part == "refit"]
    off = replace(part, simulated=tuple(s + 3.0 * (i in (0, 4)) for i, s in enumerate(part.measured)))
    assert causes(run.steps, off) == (
        "step 0 by +3.00 s (the first one, which warms up); step 4 by +3.00 s (beside the writing of a checkpoint)"
    )
    even = replace(part, simulated=tuple(s + 0.1 for s in part.measured))
    assert causes(run.steps, even) == "no step has much more of it than others"


def test_a_fixed_part_is_what_lies_above_the_arithmetic() -> None:
    assert above([], 2.0) == (0.0, 2.0)
    assert above([(1, 3.0), (3, 7.0)], 2.0) == (pytest.approx(1.0), 2.0)
    assert above([(1, 1.0), (3, 3.0)], 2.0) == (0.0, pytest.approx(1.0))  # faster than the arithmetic


def test_drafts_along_stored_text_are_told_from_others() -> None:
    speed = DecodingSpeed(RowCost(1.0, 0.1), replayed_tokens=5.0, replayed_drafts=8.0)
    response = SimulatedResponse(0, 20, 20, 2.0, 0.5, drafts=3.0)
    assert response.mean_drafts(20, speed) == pytest.approx((2 * 8 + 5 * 3) / 7)
    assert decode([response], [20], speed, 1).seconds == pytest.approx(7 * 1.0 + 0.1 * (7 + 2 * 8 + 5 * 3))
    rows = make_rollouts(0, 0)  # 20 and 30 tokens in 10 and 15 iterations, with 50 drafted tokens
    assert typical_drafts(rows, {"by_source": {"replay": [5, 30, 20]}}) == pytest.approx(20 / 20)


def test_the_command_compares_a_run_with_itself(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    write_config(config)
    train = config.run_dir / "stages" / "train-synthetic"
    (train / "steps").mkdir(parents=True)
    for number in range(6):
        for rank in range(2):
            rows = make_rollouts(number, rank, signal=number != 5)
            write_rollouts(rollout_path(train / "rollouts", number, rank), rows)
        (train / "steps" / f"step={number:06d}.json").write_text(json.dumps(make_step(number, config)[1]))
    path = tmp_path / "rows.json"
    command = ["project", "synthetic", "--runs-dir", str(tmp_path), "--ranks", "2", "--json", str(path)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert "The 6 steps of synthetic, simulated with costs measured in the other half of its steps" in result.output
    rows = {row["part"]: row for row in json.loads(path.read_text())}
    assert list(rows) == ["generation", "policy_update", "drafter_update", "refit", "checkpoint", "step"]
    run = read_run(train / "steps", train / "rollouts")
    assert len(run.steps) == 6
    assert abs(rows["step"]["error"]) < 0.1
    shutil.rmtree(train / "rollouts" / "step=000003")
    with pytest.raises(ConfigError, match="no rollouts of step 3 in "):
        CliRunner().invoke(app, command, catch_exceptions=False)
