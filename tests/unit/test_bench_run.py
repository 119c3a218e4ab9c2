"""The cells of `specrl bench run`, and what it makes of trainings whose steps were taken in turn."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flows.cli import invoke
from specrl.artifacts import write_scores
from specrl.bench.cells import Cell, config_of, parse_cells, speedups
from specrl.bench.job import BenchJob
from specrl.bench.options import RunOptions
from specrl.bench.run import rank
from specrl.bench.run.main import check_memory, fitting
from specrl.bench.run.page import with_idle_time, write_run_page
from specrl.bench.run.results import Results
from specrl.bench.run.trainings import CONTEXT_FILE, Training
from specrl.bench.workers import Workers
from specrl.config import Config, ConfigError, change_config, parse_config
from specrl.config.rollout import BubblesConfig
from specrl.context import StageContext
from specrl.distributed import Ranks
from specrl.metrics import find_metric
from specrl.schemas import Rollout, rollout_path, write_rollouts
from specrl.validation.scores import SetResponses, score_set

PLAIN_S, OWN_S = (9.0, 8.0, 10.0), (9.0, 4.0, 4.0)
"""The seconds of three steps, the first of which is the warm-up."""
PLAIN = "speculation.method=none, speculation.k=0"


def make_results(
    folder: Path, name: str, seconds: tuple[float, ...], last_token: int = 5, accepted: int = 0
) -> Results:
    stage = folder / name / "stage"
    (stage / "steps").mkdir(parents=True)
    for step, taken in enumerate(seconds):
        tokens = [3, 4, last_token if step == 2 else 5]
        rollouts = [
            Rollout(step, 0, 0, sample, step, 0, 7, [1, 2], tokens, [0.0] * 3, "", "", "stop") for sample in range(2)
        ]
        for rollout in rollouts:
            rollout.num_accepted_tokens = accepted
            rollout.reward = 1.0 if rollout.response_tokens[-1] == 5 else 0.0
        write_rollouts(rollout_path(stage / "rollouts", step, 0), rollouts)
        times = {"timing/step_s": taken, "timing/generation_s": taken - 2, "timing/validation_s": 1.0}
        others = {"reward/mean": 0.5, "spec/acceptance_length": 2.0, "spec/decode_steps": taken}
        others |= {"spec/num_draft_tokens": 0.0, "spec/num_accepted_tokens": 2.0 * accepted}
        record = {"step": step, "metrics": times | others}
        (stage / "steps" / f"step={step:06d}.json").write_text(json.dumps(record))
    context = StageContext(Config(name="r"), "train", "train-0", stage, {}, "")
    walls = [taken + 1 for taken in seconds]
    return Results(Training(Cell(name, ("seed=3",)), context, start_s=10.0, walls=walls), 1)


def test_ratios_are_of_the_same_rounds_and_leave_out_warm_up_and_validation(tmp_path: Path) -> None:
    plain, own = make_results(tmp_path, "plain", PLAIN_S), make_results(tmp_path, "both", OWN_S)
    row = own.row(plain)
    steps = (row["step_ratio"], row["step_min"], row["step_max"])
    assert steps == pytest.approx(((7 / 3 + 3) / 2, 7 / 3, 3.0))
    assert row["generation_ratio"] == pytest.approx((3 + 4) / 2)
    assert row["end_to_end_ratio"] == pytest.approx((10 + 27 + 3) / (10 + 17 + 3))
    assert row["decode_steps"] == 8 and row["decode_step_ratio"] == pytest.approx(8 / 18)
    assert row["tokens_equal"] and row["reward_difference"] == 0 and row["acceptance_length"] == 2.0
    assert row["step_s"] == 4 and row["idle_s"] == 0 and row["token_mult_prob_error"] is None
    apart = own.row(plain, in_turn=False)
    assert apart == {name: value for name, value in row.items() if name in apart}
    times = {f"{name}_{part}" for name in ("generation", "step") for part in ("ratio", "min", "max")}
    assert row.keys() - apart.keys() == times | {"end_to_end_ratio"}
    assert (row["cell"], row["seed"], row["is_baseline"], plain.row(plain)["is_baseline"]) == ("both", "3", False, True)


def with_settings(results: Results, cell: Cell, **speculation: object) -> Results:
    config = parse_config({"name": "r", "speculation": speculation})
    context = replace(results.training.context, config=config)
    return Results(replace(results.training, context=context, cell=cell), 1)


def test_steps_on_gpus_are_projected_by_epoch_over_a_step_without_drafts(tmp_path: Path) -> None:
    plain, own = (make_results(tmp_path, str(accepted), PLAIN_S, accepted=accepted) for accepted in (0, 1))
    plain = with_settings(plain, Cell("none", ()), method="none", k=0)
    found = {name: value for name, value in own.projected().items() if name.startswith("step_")}
    assert found.keys() == {"step_8_gpus_by_epoch", "step_32_gpus_by_epoch", "step_128_gpus_by_epoch"}
    assert {name: plain.projected()[name] for name in found} == {name: [pytest.approx(1)] for name in found}
    [share] = found["step_128_gpus_by_epoch"]
    assert 1 < share < 3 / 2  # tokens per iteration; the drafter's passes and the rest of the step cost
    counts = {"k": 0.0, "passes": 3.0, "pace": 1.5, "paces": (1.5,) * 6, "whole_vocabulary": False}
    assert own.projected()["drafts_by_epoch"] == [counts]
    other = with_settings(own, Cell("x", ()), method="draft_model", k=3, draft_model=str(tmp_path))
    assert other.projected() == {}  # a smaller model costs something else


def test_idle_time_is_simulated_for_cells_that_draft_from_text_and_used_none(tmp_path: Path) -> None:
    made = make_results(tmp_path, "text", PLAIN_S, accepted=1)
    text = with_settings(made, Cell("text", ()), method="replay", replay_k=3)
    rows = with_idle_time([{"cell": "text", **text.projected()}])
    assert [row["agrees"] for row in rows] == ["100 tokens", "1000 tokens", "to its end"]
    steps = [row["step_128_gpus_by_epoch"][0] for row in rows]
    assert text.projected()["step_128_gpus_by_epoch"][0] < steps[0] < steps[1] < steps[2]
    busy = text.training.context.config.model_copy(update={"bubbles": BubblesConfig(use="pregenerate")})
    context = replace(text.training.context, config=busy)
    assert Results(replace(text.training, context=context), 1).projected() == {}


def test_padding_counts_as_drafted_and_text_is_told_apart_by_its_source(tmp_path: Path) -> None:
    for name in ("plain", "both"):
        make_results(tmp_path, name, PLAIN_S)
    for path in (tmp_path / "both" / "stage" / "steps").glob("*.json"):
        record = json.loads(path.read_text())
        record["metrics"] |= {"spec/k": 7.0, "spec/num_draft_tokens": 5.0, "spec/num_accepted_tokens": 2.0}
        record["metrics"] |= {"spec/replay_draft_tokens": 4.0, "spec/replay_accepted_tokens": 1.0}
        path.write_text(json.dumps(record))
    context = StageContext(Config(name="r"), "train", "train-0", tmp_path / "both" / "stage", {}, "")
    results = Results(Training(Cell("both", ()), context), 1)
    drafts = results.drafts(range(1, 3))
    assert (1 / drafts.pace, drafts.k / drafts.pace) == pytest.approx(((6 - 2) / 6, 7 * (6 - 2) / 6))
    assert (results.accepted("replay"), results.accepted("recent")) == (0.25, None)


def test_what_an_earlier_command_has_trained_is_known_by_its_configuration_and_code(tmp_path: Path) -> None:
    training = make_results(tmp_path, "plain", PLAIN_S).training
    assert not training.was_taken(3)
    training.context.save(tmp_path / "plain" / CONTEXT_FILE)
    assert training.was_taken(3) and not training.was_taken(4)
    assert not Training(training.cell, replace(training.context, key="train-1")).was_taken(3)


def test_responses_that_differ_are_counted_and_the_page_has_every_cell(tmp_path: Path) -> None:
    plain, own = make_results(tmp_path, "plain", PLAIN_S), make_results(tmp_path, "both", OWN_S, last_token=6)
    rows = [{**found.row(plain), "hardware": "two cores"} for found in (plain, own)]
    assert not rows[1]["tokens_equal"] and rows[1]["same_responses"] == pytest.approx(4 / 6)
    assert rows[1]["reward_difference"] == pytest.approx(-1 / 3)
    job = BenchJob("run", {}, "specrl bench run", tmp_path, tmp_path / "page.md")
    write_run_page(job, rows, {"k = 9": "it broke"})
    text = job.page.read_text()
    assert "| both | 3 | 3.50x (3.00 to 4.00) | 2.67x (2.33 to 3.00) |" in text
    assert "against **plain**" in text and "- k = 9: it broke" in text and text.count("two cores") == 1


def test_accuracy_is_compared_prompt_by_prompt_and_drawn_with_its_intervals(tmp_path: Path) -> None:
    found = [make_results(tmp_path, name, PLAIN_S) for name in ("plain", "both")]
    assert found[1].accuracy(found[0]) == {}  # nothing was validated
    generator = np.random.default_rng(0)
    before = (generator.random((40, 1)) < 0.5).astype(float)
    changed = before.copy()
    changed[:7], changed[7:9] = 1 - before[:7], 1 - before[7:9]
    better = [int(changed[row, 0] > before[row, 0]) for row in range(9)]
    for results, last in zip(found, (before, changed), strict=True):
        for step, rewards in ((0, before), (10, last)):
            responses = SetResponses(rewards, np.full((40, 1), 3), np.zeros((40, 1), dtype=bool))
            write_scores(results.training.folder, step, [score_set(step, "main", responses, [1], 1.0, 1.0, 1.0)])
    found = [Results(results.training, 1) for results in found]
    plain, own = ({**results.row(found[0]), "hardware": "two cores"} for results in found)
    assert (plain["better_and_worse_prompts"], plain["p_value"]) == ([0, 0], 1.0)
    assert own["better_and_worse_prompts"] == [sum(better), 9 - sum(better)]
    least = min(sum(better), 9 - sum(better))
    assert own["p_value"] == pytest.approx(2 * sum(math.comb(9, few) for few in range(least + 1)) / 2**9)
    job = BenchJob("run", {}, "specrl bench run", tmp_path, tmp_path / "page.md")
    write_run_page(job, [plain, own])
    assert "(page-accuracy.svg)" in job.page.read_text()
    assert "both seed=3" in (tmp_path / "page-accuracy.svg").read_text()
    write_scores(found[1].training.folder, 10, [found[1].curve[-1].model_copy(update={"measure": "of other prompts"})])
    other = Results(found[1].training, 1).accuracy(found[0])
    assert other["accuracy"] == own["accuracy"] and "p_value" not in other


def test_cells_are_all_combinations_and_seeds_are_repetitions_with_a_baseline_each() -> None:
    cells = parse_cells(
        ["train.lr=1,2", "seed=7,8"], [f"plain: {PLAIN}", 'own: data.stop=["a, b", "c"], bubbles={use="both"}', "x:"]
    )
    assert len(cells) == 12 and [cell.seed for cell in cells[:3]] == ["7", "8", "7"]
    assert cells[0].name == cells[1].name == "plain train.lr=1" and cells[0].label == "plain train.lr=1 seed=7"
    assert cells[4].changes[:2] == ('data.stop=["a, b", "c"]', 'bubbles={use="both"}')
    groups = RunOptions(cells, 1, 0, 3, 0).groups
    assert [next(cell.label for cell in group) for group in groups] == [
        *["plain train.lr=1 seed=7"] * 3,
        *["plain train.lr=1 seed=8"] * 3,
    ]
    assert [len(group) for group in groups] == [3, 3, 2, 3, 3, 2]
    assert [len(group) for group in RunOptions(cells, 1, 0, None, 0).groups] == [6, 6]
    assert RunOptions(cells, 1, 0, 1, 0).groups == [(cell,) for cell in cells]
    for vary, bundles, words in (
        (["train.lr"], [], "expected KEY=A,B"),
        ([], ["plain"], "expected 'NAME: KEY=VALUE"),
        ([], ["a: train.lr=1", "a: train.lr=2"], "two cells are called 'a'"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_cells(vary, bundles)


def test_a_cell_is_the_runs_configuration_with_its_changes_and_without_checkpoints() -> None:
    run = Config(name="r")
    made = config_of(run, Cell("x", ("model.dtype=float32", "bubbles.use=train_drafter", "seed=9")), 4, 0)
    assert (made.model.dtype, made.bubbles.use, made.seed) == ("float32", "train_drafter", 9)
    assert made.train.num_steps == made.train.checkpoint_every == 5  # one is never taken: it would write a checkpoint
    assert made.validate_.every == 4
    assert config_of(run, Cell("x", ()), 9, 3).validate_.every == 3
    own = change_config(run, ["validate.sets={mine={num_prompts=250, samples_per_prompt=8}}"])
    assert config_of(own, Cell("x", ()), 4, 0).validate_.sets == own.validate_.sets
    for every in (4, 10):  # with 10 only the policy before training would be measured, and called the final one
        with pytest.raises(ConfigError, match=f"--validate-every {every} with 9 steps"):
            config_of(run, Cell("x", ()), 9, every)
    for change, words in (
        ("speculation.method=medusa", "speculation.method"),
        ("train.nothing=1", r"train\.nothing"),
        ("train.num_steps=9", r"train\.num_steps: bench run sets it itself"),
        ("tracking.uri=x", r"tracking\.uri: bench run varies what trainings read"),
        ("resources.nodes=2", r"add --set stage_resources\.train\.nodes=1"),
    ):
        with pytest.raises(ConfigError, match=words):
            config_of(run, Cell("x", (change,)), 4, 0)


class Parent:
    """Asks for no step."""

    def __init__(self) -> None:
        self.said: list[Any] = [1, "context.json", None]

    def recv(self) -> Any:
        if not self.said:
            raise EOFError
        return self.said.pop(0)

    def send(self, _: object) -> None:
        pass


def test_a_rank_keeps_no_best_policy_whose_checkpoint_would_count_as_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = config_of(Config(name="r"), Cell("x", ()), 4, 0)
    trainer: Any = SimpleNamespace(validation=SimpleNamespace(best_metric=made.best_metric))
    trainer.restore, trainer.refit_engine, trainer.shutdown = lambda: 0, lambda version: None, lambda: None
    stage: Any = SimpleNamespace(build=lambda *_: trainer)
    monkeypatch.setitem(sys.modules, "specrl.stages.train", stage)
    monkeypatch.setattr("specrl.stages.train", stage, raising=False)
    monkeypatch.setattr(rank.StageContext, "load", lambda _: SimpleNamespace(stage_dir=Path()))
    for name in ("end_with_parent", "leave"):
        monkeypatch.setattr(rank, name, lambda *_: None)
    monkeypatch.setattr(rank, "join", lambda: Ranks(0, 1, 0, torch.device("cpu")))
    monkeypatch.setattr(rank, "Progress", lambda *_, **__: nullcontext())
    parent: Any = Parent()
    assert trainer.validation.best_metric is not None
    rank.main(parent)
    assert trainer.validation.best_metric is None


def test_a_preset_of_a_cell_that_contradicts_what_set_asks_for_is_refused() -> None:
    preset, given = Cell("x", ("train.algorithm=dr-grpo",)), ["train.loss_mean=response"]
    run = change_config(Config(name="r"), given)
    with pytest.raises(ConfigError, match=r'^train\.algorithm = "dr-grpo" sets train\.loss_mean, too'):
        config_of(run, preset, 4, 0, given=given)
    made = config_of(run, Cell("x", ("train.loss_mean=token",)), 4, 0, given=given)
    assert made.train.loss_mean == "token"  # a cell has the last word about a setting
    assert config_of(run, preset, 4, 0).train.loss_mean == "constant"  # as where the run was configured with it


def test_the_speedups_in_mlflow_are_those_of_the_run_itself_over_plain_decoding() -> None:
    cells = parse_cells([], [f"plain: {PLAIN}", "own:", "k1: speculation.k=1"])
    rows = [
        {"cell": name, "generation_ratio": ratio, "step_ratio": ratio, "end_to_end_ratio": ratio}
        for name, ratio in (("plain", 1.0), ("own", 1.5), ("k1", 2.0))
    ]
    own = speedups(rows, cells, Config(name="r"))
    assert own == {"speedup/generation": 1.5, "speedup/step": 1.5, "speedup/end_to_end": 1.5}
    assert all(find_metric(name) for name in own)
    assert speedups(rows, cells[:1] + cells[2:], Config(name="r")) == {}  # other settings' speedups are not this run's
    assert speedups(rows, cells[1:], Config(name="r")) == {}  # nor is one over another drafter


def test_trainings_that_do_not_fit_into_memory_together_are_refused() -> None:
    small = parse_config({"name": "small", "model": {"source": "tiny"}})
    check_memory([small])
    large = parse_config({"name": "large", "model": {"source": "Qwen/Qwen3-235B-A22B"}})
    with pytest.raises(ConfigError, match=r"2 trainings at once need [\d.]+ GiB of memory, and this machine has "):
        check_memory([small, large])


@pytest.mark.parametrize(("gib", "number"), [(0.01, 1), (1000.0, 3)])
def test_as_many_drafters_are_trained_at_once_as_fit_into_memory(
    gib: float, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrl.bench.run.main.machine_gib", lambda: gib)
    assert fitting(parse_config({"name": "small", "model": {"source": "tiny"}}), most=3) == number


def test_nothing_starts_for_a_run_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert invoke(["bench", "run", "--run", "nobody", "--runs-dir", str(tmp_path), "--vary", "seed=1,2"]) == 2
    assert "no run nobody" in capsys.readouterr().err


def test_a_rank_that_ends_is_reported_with_the_last_line_of_its_log(tmp_path: Path) -> None:
    said = rf"^rank 0 of it ended before its step: .*AttributeError: .*; log: {tmp_path}"
    with (
        Workers("specrl.bench.gpu.communication", "it", tmp_path, 1, 1, "no scale") as workers,
        pytest.raises(RuntimeError, match=said),
    ):
        workers.answers()
