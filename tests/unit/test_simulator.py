"""The simulator of steps on GPUs: its limits where the answer is known, and the published table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.folder import write_config
from specrl.config import ConfigError, load_config
from specrl.models.shapes import KNOWN_SHAPES, model_shape
from specrl.projection.simulator.choices import ACCEPTANCE, choices, hardware_of, ideas, model_of
from specrl.projection.simulator.engine import HARDWARE, Efficiency, EngineModel
from specrl.projection.simulator.published import PublishedRow, published_rows
from specrl.projection.simulator.step import Lengths, Speculation, StepModel, Workload, acceptance_length
from specrl.schemas import Rollout, rollout_path, write_rollouts

IDEAL = Efficiency(flops=1.0, bandwidth=1.0, iteration_s=0.0, draft_pass_s=0.0, message_s=0.0, verified_row=0.0)
H100 = HARDWARE["H100"]
CONFIGS = Path(__file__).parents[2] / "configs"


def dense(**fields: object) -> EngineModel:
    engine = EngineModel(KNOWN_SHAPES["Qwen/Qwen3-8B"], H100, efficiency=IDEAL)
    return replace(engine, **fields)  # type: ignore[arg-type]


def experts(**fields: object) -> EngineModel:
    return dense(shape=KNOWN_SHAPES["Qwen/Qwen3-30B-A3B"], **fields)


def test_one_request_costs_a_read_of_the_weights_and_many_cost_their_products() -> None:
    shape = KNOWN_SHAPES["Qwen/Qwen3-8B"]
    weights = 2 * (shape.parameters - shape.embedding_parameters)  # the input embeddings are looked up
    assert dense(prompt_tokens=0).at(1, 0) == pytest.approx(weights / H100.memory_bandwidth, rel=0.01)
    products = weights * 20_000 / H100.bf16_flops  # two operations for each weight of two bytes
    assert dense(prompt_tokens=0).at(20_000, 0) == pytest.approx(products, rel=0.01)


def test_few_rows_read_few_experts_and_many_read_all() -> None:
    shape = KNOWN_SHAPES["Qwen/Qwen3-30B-A3B"]
    alone, many = experts(prompt_tokens=0).at(1, 0), experts(prompt_tokens=0).at(256, 0)
    active, stored = shape.active_parameters, shape.parameters
    assert alone == pytest.approx(2 * (active - shape.embedding_parameters) / H100.memory_bandwidth, rel=0.02)
    assert many > 2 * (stored - shape.embedding_parameters) / H100.memory_bandwidth * 0.99


@pytest.mark.parametrize("engine", [dense(), experts()], ids=["dense", "experts"])
def test_an_iteration_costs_more_with_more_of_anything(engine: EngineModel) -> None:
    usual = engine.at(8, 100)
    assert engine.at(9, 100) > usual < engine.at(8, 200)
    assert replace(engine, k=1).at(8, 100) > usual > replace(engine, is_fp8=True).at(8, 100)
    assert replace(engine, gpus=2).at(8, 100) < usual


def step(efficiency: Efficiency | None = None, **fields: object) -> StepModel:
    workload = Workload(prompts=16, samples=4, lengths=Lengths(200, 0.8, 2000))
    engine = EngineModel(KNOWN_SHAPES["Qwen/Qwen3-8B"], H100, efficiency=efficiency or Efficiency())
    return replace(StepModel(engine, 4, workload), **fields)  # type: ignore[arg-type]


def seconds(model: StepModel, speculation: Speculation) -> float:
    return model.step(speculation).generation


def test_generation_takes_its_longest_response_where_iterations_cost_the_same() -> None:
    same = replace(IDEAL, iteration_s=1000.0)  # beside which all else vanishes
    lengths = [max(max(item.tokens for item in group) for group in drawn) for drawn in step().workload.draw(3, seed=0)]
    assert seconds(step(efficiency=same), Speculation()) == pytest.approx(1000 * sum(lengths) / 3, rel=1e-3)
    assert seconds(step(efficiency=same), Speculation(3, 2.0)) == pytest.approx(500 * sum(lengths) / 3, rel=1e-3)


def test_an_engine_that_cannot_run_all_responses_at_once_takes_longer() -> None:
    assert seconds(step(most_running=4), Speculation()) > seconds(step(), Speculation())


def test_bubbles_shorten_generation_and_a_step_is_the_sum_of_its_parts() -> None:
    plain, bubbles = step().step(Speculation()), step().step(Speculation(bubbles="pregenerate"))
    assert bubbles.generation < plain.generation and bubbles.update == plain.update
    parts = plain.generation + plain.logprob + plain.update + plain.refit
    assert plain.total == pytest.approx(parts + step().other_s)


@pytest.fixture(scope="module")
def rows() -> list[PublishedRow]:
    return published_rows()


def test_published_speedups_are_within_five_percent(rows: list[PublishedRow]) -> None:
    chosen = [row for row in rows if row.chosen_on and row.k]
    assert len(chosen) == 10
    errors = {(row.setting, row.quantity): abs(row.ratio - 1) for row in rows if row.chosen_on}
    assert all(errors[row.setting, row.quantity] <= 0.05 for row in chosen)
    assert all(error <= 0.17 for error in errors.values())


def test_rows_that_are_predicted_are_named(rows: list[PublishedRow]) -> None:
    predicted = [row for row in rows if not row.chosen_on]
    assert sorted(row.k for row in predicted) == [3] * 6 + [5, 5, 7, 7]
    assert all(row.as_json()["chosen_on"] is row.chosen_on for row in rows)
    # What the simulator does not know: the measured engine loses from k = 3 on.
    assert all(row.ratio > 1.2 for row in predicted if row.k in (5, 7))
    assert all(abs(row.ratio - 1) < 0.15 for row in predicted if row.k == 3)


def test_acceptance_goes_on_falling_beyond_the_known_positions() -> None:
    assert acceptance_length((0.8, 0.4), 0) == 1.0
    assert acceptance_length((0.8, 0.4), 2) == pytest.approx(2.2)
    assert acceptance_length((0.8, 0.4), 4) == pytest.approx(2.2 + 0.2 + 0.1)
    assert acceptance_length((0.6, 0.9), 7) == pytest.approx(1 + 0.6 + 6 * 0.9)  # never more than is drafted


def test_a_configuration_is_simulated_with_its_own_layout() -> None:
    config = load_config(CONFIGS / "qwen3-8b-rl-zero.toml")
    model = model_of(config, hardware_of(config, None))
    assert (model.engine.hardware.name, model.gpus, model.engine.gpus, model.most_running) == ("H100", 8, 1, 56)
    found = {choice.name: choice for choice in choices(replace(model, workload=step().workload), ACCEPTANCE)}
    assert found["plain"].step_speedup == 1.0
    assert 1 < found["k = 3"].step_speedup < found["k = 3"].generation_speedup < acceptance_length(ACCEPTANCE, 3)


def test_a_drafter_is_simulated_with_its_own_vocabulary() -> None:
    config = load_config(CONFIGS / "qwen3-8b-rl-zero.toml")
    small, layer = config.updated(drafter={"draft_vocab_size": 2048}), load_config(CONFIGS / "mtp.toml")
    sizes = [model_of(one, H100).engine.draft_vocab_size for one in (config, small, layer)]
    assert sizes == [32000, 2048, model_shape(layer.model).vocab_size]


def test_every_use_of_idle_time_is_simulated_with_and_without_drafts() -> None:
    found = {choice.name: choice.time for choice in choices(step(), ACCEPTANCE)}
    for base in ("plain", "k = 3"):
        none, training, both = found[base], found[f"{base}, train_drafter"], found[f"{base}, both"]
        pregenerated = found[f"{base}, pregenerate"]
        assert pregenerated.generation < none.generation == training.generation
        assert pregenerated.generation <= both.generation < none.generation
        assert none.idle_share == training.idle_share > 0
        assert none.used_share == 0 < pregenerated.used_share <= training.used_share == both.used_share == 1


def test_all_ideas_together_are_faster_than_each_alone_and_each_is_faster_than_none() -> None:
    config = load_config(CONFIGS / "qwen3-8b-rl-zero.toml")
    none, alone, together = ideas(model_of(config, hardware_of(config, None)), ACCEPTANCE)
    [plain] = (time.total for time in none.values())
    assert len(alone) == 4 and plain > max(time.total for time in alone.values())
    assert together["all"].total < together["all but FP8"].total < min(time.total for time in alone.values())


def test_the_drafter_takes_an_update_in_every_step_unless_it_is_frozen_or_learns_in_idle_time() -> None:
    def seconds(**changes: float) -> dict[str, float]:
        config = load_config(CONFIGS / "qwen3-8b-rl-zero.toml")
        config = config.model_copy(update={"drafter": config.drafter.model_copy(update=changes)})
        model = replace(model_of(config, hardware_of(config, None)), workload=step().workload)
        return {choice.name: choice.time.drafter for choice in choices(model, ACCEPTANCE)}

    found = seconds()
    assert found["plain"] == found["k = 3, train_drafter"] == 0 < found["k = 3"] == found["k = 3, pregenerate"]
    assert seconds(update_every=4)["k = 3"] == pytest.approx(found["k = 3"] / 4)
    assert set(seconds(online_lr=0.0).values()) == {0.0}


def test_unknown_hardware_and_a_run_without_gpus_are_one_line() -> None:
    config = load_config(CONFIGS / "qwen3-8b-rl-zero.toml")
    with pytest.raises(ConfigError, match="--hardware A100: allowed: H100, H200, GB200"):
        hardware_of(config, "A100")
    with pytest.raises(ConfigError, match="simulates GPUs"):
        hardware_of(load_config(CONFIGS / "smoke.toml"), None)


def invoked(*words: str) -> str:
    return CliRunner().invoke(app, ["project", *words], catch_exceptions=False).output


def test_the_command_prints_published_rows_and_writes_which_ones_constants_were_chosen_on(tmp_path: Path) -> None:
    text = invoked("--published", "--json", str(tmp_path / "rows.json"))
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["chosen_on"] for row in rows} == {True, False} and len(rows) == 27
    assert all(row["ratio"] == pytest.approx(row["predicted"] / row["published"]) for row in rows)
    errors = [abs(row["ratio"] - 1) for row in rows if not row["chosen_on"]]
    assert f"mean absolute error of the rows that are predicted: {sum(errors) / len(errors):.0%}" in text


def test_the_command_simulates_a_run_on_other_gpus_with_its_own_responses(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "smoke.toml", ["name=measured", f"runs_dir={tmp_path}", "train.num_steps=3"])
    write_config(config)
    train = config.run_dir / "stages" / "train-0"
    (train / "steps").mkdir(parents=True)
    response = Rollout(0, 0, 0, 0, 0, 0, 1, [1, 2], [3] * 40, [0.0] * 40, "", "", "stop", num_accepted_tokens=20)
    write_rollouts(rollout_path(train / "rollouts", 0, 0), [response])
    metrics = {"timing/generation_s": 7.0, "spec/acceptance_rate_pos_1": 0.6, "spec/acceptance_rate_pos_2": 0.3}
    (train / "steps" / "step=000000.json").write_text(json.dumps({"metrics": metrics}))
    run = ("measured", "--runs-dir", str(tmp_path))
    text = invoked(*run, "--hardware", "H200", "--gpus", "4")
    assert "Simulated steps of measured on 4 H200, engines of 1" in text and "median of 40 tokens" in text
    assert "positions 1, 2, ...: 0.6, 0.3," in text and "measured: 7.0 s of generation" in text
    for wrong, message in (
        (run, "asks for none; name one with --hardware"),
        ((str(CONFIGS / "qwen3-32b.toml"), "--gpus", "6"), "multiples of engine.tensor_parallel = 4"),
        ((), "name a run or a configuration file"),
    ):
        with pytest.raises(ConfigError, match=message):
            invoked(*wrong)
