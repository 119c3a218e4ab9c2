"""What `specrl bench run` makes of trainings whose steps were taken in turn: ratios, costs, partings, and the page."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specrl.artifacts import PretrainResult, write_result
from specrl.bench.interleaved.energy import EnergyMeter
from specrl.bench.interleaved.side import TrainStep
from specrl.bench.job import BenchJob
from specrl.bench.run.main import check_memory
from specrl.bench.run.page import write_page
from specrl.bench.run.partings import Parting, distance_of, find_partings
from specrl.bench.run.results import Comparison, paired_test, read_responses
from specrl.bench.run.settings import RunSettings, SweepSettings
from specrl.bench.run.training import UseRun, order_of, start_order
from specrl.bench.tables import Spread
from specrl.bench.uses import USES, Use, parse_use
from specrl.config import Config, ConfigError, SamplingConfig, parse_config
from specrl.context import StageContext
from specrl.metrics import find_metric
from specrl.rollout.sampling.inverse_cdf import uniforms
from specrl.schemas import Rollout, rollout_path, write_rollouts

PLAIN_S, OWN_S = (9.0, 8.0, 10.0), (9.0, 4.0, 4.0)
"""The seconds of three steps, the first of which is the warm-up."""


def make_run(folder: Path, name: str, seconds: tuple[float, ...], last_token: int = 5) -> UseRun:
    for step in range(3):
        rollouts = [
            Rollout(
                step,
                0,
                0,
                sample,
                step,
                0,
                7,
                [1, 2],
                [3, 4, last_token if step == 2 else 5],
                [0.0] * 3,
                "",
                "",
                "stop",
            )
            for sample in range(2)
        ]
        for rollout in rollouts:
            rollout.reward = 1.0 if rollout.response_tokens[-1] == 5 else 0.0
        write_rollouts(rollout_path(folder / name / "stage" / "rollouts", step, 0), rollouts)
    config = RunSettings(threads=2).config_of(Config(name="r", speculation={"k": 3}), folder / name, name, "bf16")
    context = StageContext(config, "train", f"train-{name}", folder / name / "stage", {}, "")
    parts = {f"timing/{part}_s": 0.5 for part in ("policy_update", "refit", "checkpoint", "drafter_update")}
    steps = []
    for number, taken in enumerate(seconds):
        times = {"timing/step_s": taken, "timing/generation_s": taken - 2, "timing/validation_s": 1.0}
        others = {"reward/mean": 0.5, "spec/acceptance_length": 2.0, "rollout/response_length_mean": 3.0}
        steps.append(TrainStep(number, times | parts | others, 1, 2, 3.0, 2.0, cpu_s=2 * taken, wall_s=taken + 1))
    return UseRun(name, "bf16", context, start_s=10.0, steps=steps, joules=[60.0] * 3)


def make_comparison(folder: Path, last_token: int = 5) -> Comparison:
    plain, own = make_run(folder, "plain", PLAIN_S), make_run(folder, "both", OWN_S, last_token)
    return Comparison(own, plain, 1, read_responses(own.rollouts_dir), read_responses(plain.rollouts_dir))


def test_ratios_are_of_the_same_rounds_and_leave_out_warm_up_and_validation(tmp_path: Path) -> None:
    found = make_comparison(tmp_path)
    assert found.step == Spread(pytest.approx((7 / 3 + 3) / 2), pytest.approx(7 / 3), pytest.approx(3.0))
    assert found.generation.median == pytest.approx((3 + 4) / 2)
    assert found.end_to_end == pytest.approx((10 + 27 + 3) / (10 + 17 + 3))
    assert found.tokens_equal and found.reward.p_value == 1.0
    assert found.reserved_hours == pytest.approx(4 * 6 / 12 * 1e6 / 3600)  # two ranks with two threads
    assert found.busy_hours == pytest.approx(16 / 12 * 1e6 / 3600)
    assert found.joules_per_token == pytest.approx(120 / 12)
    contract = {"use", "generation_ratio", "step_ratio", "end_to_end_ratio", "ratio_min", "ratio_max", "tokens_equal"}
    assert contract <= set(found.row())


def test_a_response_that_differs_is_found_with_its_place_and_the_page_names_it(tmp_path: Path) -> None:
    found = make_comparison(tmp_path, last_token=6)
    assert not found.tokens_equal and found.num_same == 4
    (parting, other) = find_partings(found.plain_responses, found.responses)
    assert (parting.step, parting.index, parting.tokens, parting.context) == (2, 2, (5, 6), [1, 2, 3, 4])
    assert other.step == 2
    assert found.reward.difference == pytest.approx(-1 / 3) and found.reward.num_different == 1
    pretrained = PretrainResult(drafter_dir=None, rollouts_dir=tmp_path, num_responses=1, reward_mean=0.0, seconds=90.0)
    for stage in ("prepare", "pretrain", "calibrate"):
        write_result(tmp_path / "run" / "stages" / f"{stage}-0", pretrained)
    page = tmp_path / "page.md"
    job = BenchJob("specrl.bench.run.main:main", tmp_path / "run", {}, "specrl bench run", page, tmp_path)
    plain = Comparison(found.plain, found.plain, 1, found.plain_responses, found.plain_responses)
    write_page(job, RunSettings(precisions=("bf16",)), [plain, found], "")
    text = page.read_text()
    assert "| bf16 | both | eagle3+replay | 3 | both | 3.50x (3.00 to 4.00) | 2.67x (2.33 to 3.00) |" in text
    assert "2 of 6 responses part, the first ones in step 2 (2, the earliest at token 2)" in text
    assert "not measured, as this machine has no counter" in text and "took 90 s" in text


def test_a_paired_test_finds_a_difference_and_none_where_there_is_none() -> None:
    noise = random.Random(0)
    assert paired_test([noise.gauss(1.0, 1.0) for _ in range(40)]).p_value < 0.001
    assert paired_test([noise.gauss(0.0, 1.0) for _ in range(40)]).p_value > 0.05
    assert paired_test([0.0, 0.0]).p_value == 1.0


def test_every_use_begins_rounds_and_none_is_always_first() -> None:
    rounds = [order_of(["a", "b"], step) for step in range(4)]
    assert rounds == [["a", "b"], ["b", "a"], ["b", "a"], ["a", "b"]]
    assert {order_of(list("abc"), step)[0] for step in range(3)} == set("abc")
    assert start_order(RunSettings(uses=("both", "eagle3")).groups[0]) == ["eagle3", "both", "plain"]


def test_uses_are_names_or_a_method_with_bubbles() -> None:
    assert parse_use("both") is USES["both"] and parse_use("ngram/none") == Use("ngram", "none")
    for text, words in {
        "nothing": "'nothing' is not one of plain",
        "eagle3/pregenerate": "eagle3 does not draft from stored text",
        "replay/both": "replay has no drafter",
    }.items():
        with pytest.raises(ValueError, match=words):
            parse_use(text)
    settings = RunSettings(uses=("both", "eagle3", "recent"), together=2)
    assert settings.groups == [("plain", "both"), ("plain", "eagle3"), ("plain", "recent")]
    with pytest.raises(ConfigError, match="uses: eagle3 needs a drafter"):
        RunSettings().check(Config(name="r", speculation={"method": "none", "k": 0}))


def test_fp32_trains_without_the_correction_that_reads_the_engines_last_bits() -> None:
    config = RunSettings(steps=3).config_of(Config(name="r"), Path("f"), "both", "fp32")
    assert (config.model.dtype, config.train.correction.name, config.bubbles.use) == ("float32", "none", "both")
    assert config.train.num_steps == 5  # one is never taken: after the last one a run writes a checkpoint
    quantised = RunSettings().config_of(Config(name="r"), Path("f"), "eagle3", "fp8")
    assert (quantised.precision.generation, quantised.precision.training) == ("fp8", "fp8")


def test_a_sweep_has_every_combination_that_can_be_once() -> None:
    sweep = SweepSettings(
        methods=("eagle3", "replay", "eagle3"), ks=(1, 3, 1), bubbles=("none", "pregenerate"), batches=(4, 8)
    )
    points = sweep.points()
    found = [
        (p.parameters["method"], p.parameters["bubbles"], p.parameters["k"], p.parameters["batch"]) for p in points
    ]
    assert found == [
        *(("eagle3", "none", k, batch) for k in (1, 3) for batch in (4, 8)),
        *(("replay", bubbles, 1, batch) for bubbles in ("none", "pregenerate") for batch in (4, 8)),
    ]
    assert points[0].settings.uses == ("plain", "eagle3/none") and points[0].settings.prompts_per_step == 4
    with pytest.raises(ConfigError, match="no method of the grid"):
        SweepSettings(methods=("ngram",), bubbles=("both",)).check(Config(name="r"))


def test_the_speedups_in_mlflow_are_those_of_the_runs_own_use() -> None:
    rows = [
        {"use": use, "precision": "bf16", "generation_ratio": ratio, "step_ratio": ratio, "end_to_end_ratio": ratio}
        for use, ratio in {"plain": 1.0, "eagle3": 1.5, "both": 2.0}.items()
    ]
    own = RunSettings().headline(rows, Config(name="r"))  # eagle3 without bubbles
    assert own == {"speedup/generation": 1.5, "speedup/step": 1.5, "speedup/end_to_end": 1.5}
    assert all(find_metric(name) for name in own)
    other = Config(name="r", speculation={"method": "ngram", "k": 2})
    assert RunSettings().headline(rows, other) == {}  # another use's speedups are not this run's
    assert RunSettings(k=1).headline(rows, Config(name="r")) == {}
    assert RunSettings(drafter="trained").headline(rows, Config(name="r")) == {}
    assert RunSettings().summary(rows, Config(name="r")) == own
    assert RunSettings().summary(rows, other)["speedup/step"] == 2.0
    assert RunSettings().summary(rows[:1], other) == {}


def test_energy_is_read_from_counters_that_begin_again(tmp_path: Path) -> None:
    def count(value: int) -> None:
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text(f"{value}\n")

    assert EnergyMeter(tmp_path).lap() is None or EnergyMeter(tmp_path).source == "NVML"
    for name in ("intel-rapl:0", "intel-rapl:0:0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "max_energy_range_uj").write_text("10000000\n")
        (tmp_path / name / "energy_uj").write_text("9000000\n")
    meter = EnergyMeter(tmp_path)
    assert "RAPL" in meter.source
    before = meter.lap()
    count(2_000_000)
    after = meter.lap()
    assert before is not None and after is not None
    assert after >= 3.0  # from 9 J past 10 J to 2 J; GPUs, where there are any, only add to it


class UniformModel:
    """A policy for which both tokens of its vocabulary are equally likely."""

    def __call__(self, tokens: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(1, tokens.shape[1], 2))


def test_how_far_a_random_number_lies_from_a_tokens_step() -> None:
    u = uniforms(torch.tensor([7]), torch.tensor([4])).item()
    for tokens, distance in (((0, 1), abs(u - 0.5)), ((1, 1), max(0.5 - u, 0.0))):
        parting = Parting(0, 7, [1, 2, 3, 4], 2, tokens)
        assert distance_of(parting, UniformModel(), SamplingConfig()) == pytest.approx(distance)


def test_trainings_that_do_not_fit_into_memory_together_are_refused() -> None:
    small = parse_config({"name": "small", "model": {"source": "tiny"}})
    check_memory([small])
    large = parse_config({"name": "large", "model": {"source": "Qwen/Qwen3-235B-A22B"}})
    with pytest.raises(ConfigError, match=r"2 trainings at once need \d+ GiB of memory, and this machine has "):
        check_memory([small, large])
