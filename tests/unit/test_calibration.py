"""Calibration: its choice of layers, and the files it leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from transformers import LlamaConfig, LlamaForCausalLM

from specrl.config import Config, ModelConfig, PolicyConfig, PrecisionConfig, SamplingConfig
from specrl.distributed import Ranks, join, leave
from specrl.models.families import LLAMA
from specrl.precision.recipe import edge_layers, layer_names, load_recipe, write_recipe
from specrl.schemas import Rollout
from specrl.training.calibration import (
    Calibration,
    KlDivergence,
    calibrate,
    calibration_data,
    grown_prefix,
    recipe_from,
    smallest_prefix,
    write_layers,
)
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy

VOCAB = 64
CONFIG = Config(
    name="calibration",
    model=ModelConfig(max_length=64),
    sampling=SamplingConfig(max_response_tokens=40),
    policy=PolicyConfig(tokens_per_micro_batch=96),
    precision=PrecisionConfig(calibration_tokens=600),
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer has outliers: some input channels of a down projection are a thousand times larger."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=160,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[7] *= 1000
        model.model.layers[1].mlp.down_proj.weight[:, 7] /= 1000
    directory = tmp_path_factory.mktemp("model")
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def make_rollouts(num_prompts: int = 12, samples: int = 2) -> list[Rollout]:
    generator = torch.Generator().manual_seed(5)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return [int(token) for token in torch.randint(0, VOCAB, (length,), generator=generator)]

    return [
        Rollout(
            0,
            0,
            prompt,
            sample,
            0,
            0,
            0,
            tokens(4, 9),
            response := tokens(8, 30),
            [0.0] * len(response),
            "",
            "",
            "stop",
        )
        for prompt in range(num_prompts)
        for sample in range(samples)
    ]


@pytest.fixture(scope="module")
def calibrated(model_dir: Path, ranks: Ranks) -> tuple[Calibration, Policy, LinearPrecision]:
    switch = LinearPrecision(emulates=True)
    policy = make_policy(model_dir, ranks, switch)
    data = calibration_data(make_rollouts(), CONFIG, 0, 1)
    reference = KlDivergence(policy, switch, data.held_out, ranks).kl(layer_names(LLAMA, 4))
    return calibrate(policy, switch, data, 0.3 * reference, ranks), policy, switch


def make_policy(model_dir: Path, ranks: Ranks, switch: LinearPrecision) -> Policy:
    return Policy(model_dir, CONFIG.policy, dtype="bfloat16", ranks=ranks, seed=0, trainable=False, fp8=switch)


def test_the_choice_holds_the_budget_on_held_out_prompts(
    calibrated: tuple[Calibration, Policy, LinearPrecision], ranks: Ranks
) -> None:
    found, policy, switch = calibrated
    assert 0 < found.kl_chosen <= 0.3 * found.kl_all_fp8
    assert 0 < len(found.bf16_layers) < 16
    assert 0 < found.bf16_flop_fraction < 1
    data = calibration_data(make_rollouts(), CONFIG, 0, 1)
    fp8 = [name for name in layer_names(LLAMA, 4) if name not in found.bf16_layers]
    assert KlDivergence(policy, switch, data.held_out, ranks).kl(fp8) == pytest.approx(found.kl_chosen, rel=1e-6)


def test_layers_that_must_stay_in_bf16_do(model_dir: Path, ranks: Ranks) -> None:
    switch = LinearPrecision(emulates=True)
    policy = make_policy(model_dir, ranks, switch)
    edges = edge_layers(LLAMA, 4, 1, 1)
    assert edges == [name for name in layer_names(LLAMA, 4) if name.split(".")[1] in "03"]
    data = calibration_data(make_rollouts(6, 1), CONFIG, 0, 1)
    found = calibrate(policy, switch, data, 100.0, ranks, always_bf16=edges)
    assert set(found.bf16_layers) == set(edges)
    assert found.kl_chosen < found.kl_all_fp8


def test_kv_scales_are_the_percentile_of_rotated_maxima_with_a_margin(
    calibrated: tuple[Calibration, Policy, LinearPrecision], model_dir: Path
) -> None:
    """Against transformers' own cache, which holds rotated keys, and values."""
    found, _, _ = calibrated
    assert found.kv_scales is not None
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    maxima: dict[str, list[list[float]]] = {"k": [[] for _ in range(4)], "v": [[] for _ in range(4)]}
    for batch in calibration_data(make_rollouts(), CONFIG, 0, 1).statistics:
        counted: set[int] = set()  # a prompt counts once
        for places, length in zip(batch.places(), batch.lengths.tolist(), strict=True):
            cache = model(batch.tokens[None, places[:length]], use_cache=True).past_key_values
            new = [column for column, place in enumerate(places[:length].tolist()) if place not in counted]
            counted.update(places[:length].tolist())
            for layer in range(4):
                maxima["k"][layer] += cache.layers[layer].keys[0].abs().amax((0, 2))[new].tolist()
                maxima["v"][layer] += cache.layers[layer].values[0].abs().amax((0, 2))[new].tolist()
    for letter, layers in maxima.items():
        for layer, values in enumerate(layers):
            exact = torch.tensor(values).quantile(0.999, interpolation="higher")
            scale = getattr(found.kv_scales, letter)[layer]
            assert 0.97 <= scale * 448 / 1.05 / float(exact) <= 1.05  # a bin, and BF16
    assert len(found.kv_scales.q) == 4


def test_the_layer_table_has_every_layer_and_what_was_chosen(
    calibrated: tuple[Calibration, Policy, LinearPrecision],
) -> None:
    found, _, _ = calibrated
    assert {row.name for row in found.rows} == set(layer_names(LLAMA, 4))
    assert {row.flops_per_token for row in found.rows if row.name.endswith("fc1")} == {2 * 384 * 160}
    kept = [row.name for row in found.rows if row.precision == "bf16"]
    assert kept == found.bf16_layers


def test_divergence_is_zero_in_bf16_and_grows_with_fp8_layers(
    calibrated: tuple[Calibration, Policy, LinearPrecision], ranks: Ranks
) -> None:
    _, policy, switch = calibrated
    divergence = KlDivergence(policy, switch, calibration_data(make_rollouts(), CONFIG, 0, 1).selection, ranks)
    assert divergence.kl([]) == 0.0
    one, some, every = (divergence.kl(layer_names(LLAMA, layers)) for layers in (1, 2, 4))
    assert 0 < min(one, some) < every


def test_divergence_is_the_kl_of_the_output_distributions(
    calibrated: tuple[Calibration, Policy, LinearPrecision], model_dir: Path, ranks: Ranks
) -> None:
    """The log-probs of sampled tokens, averaged over every token with its probability, give the same."""
    _, policy, switch = calibrated
    data = calibration_data(make_rollouts(2, 1), CONFIG, 0, 1)
    (batch,) = data.selection
    expected = 0.0
    at = torch.zeros_like(batch.mask)
    at[0, 3] = True
    only = replace(batch, mask=at, predictors=batch.predictors[3:4], targets=batch.targets[3:4])
    for token in range(VOCAB):
        changed = replace(only, targets=torch.tensor([token]))
        found = []
        for names in ([], layer_names(LLAMA, 4)):
            switch.set_fp8(names)
            found.append(float(policy.logprobs([changed])[0][0, 3]))
        expected += 2.718281828459045 ** found[0] * (found[0] - found[1])
    assert KlDivergence(policy, switch, [only], ranks).kl(layer_names(LLAMA, 4)) == pytest.approx(expected, rel=1e-3)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=200), st.floats(1e-6, 1))
@settings(deadline=None)
def test_bisection_finds_the_fewest_layers(values: list[float], budget: float) -> None:
    curve = [*sorted(values, reverse=True), 0.0]
    calls: list[int] = []

    def kl_of(count: int) -> float:
        calls.append(count)
        return curve[count]

    found = smallest_prefix(len(values), kl_of, budget)
    assert curve[found] <= budget
    assert found == 0 or curve[found - 1] > budget
    assert len(calls) <= len(values).bit_length() + 1


def test_the_set_grows_until_other_prompts_agree() -> None:
    curve = [0.1] * 40 + [0.01] * 60 + [0.0]
    assert curve[grown_prefix(20, 100, curve.__getitem__, 0.02)] <= 0.02
    assert grown_prefix(20, 100, lambda count: 1.0, 0.02) == 100
    assert grown_prefix(50, 100, curve.__getitem__, 0.02) == 50


def test_a_divergence_that_is_no_number_holds_no_budget() -> None:
    """Mutation: `kl > budget`, which NaN is not."""
    curve = [math.nan] * 5 + [0.01] * 5
    assert grown_prefix(3, 10, curve.__getitem__, 0.02) == 5
    assert grown_prefix(3, 10, lambda count: math.nan, 0.02) == 10
    assert smallest_prefix(10, lambda count: math.nan, 0.02) == 10


def test_held_out_prompts_are_other_prompts() -> None:
    rollouts = make_rollouts()
    data = calibration_data(rollouts, CONFIG, 0, 1)
    selection, held_out, probe = (
        {tuple(batch.tokens[places[:4]].tolist()) for batch in batches for places in batch.places()}
        for batches in (data.selection, data.held_out, data.probe)
    )
    assert selection
    assert held_out
    assert not selection & held_out
    assert probe <= selection
    assert sum(int(batch.lengths.sum()) for batch in data.statistics) <= CONFIG.precision.calibration_tokens
    assert sum(batch.num_tokens for batch in data.probe) <= 64


def test_ranks_share_the_rollouts() -> None:
    whole = calibration_data(make_rollouts(), CONFIG, 0, 1)
    parts = [calibration_data(make_rollouts(), CONFIG, rank, 3) for rank in range(3)]
    for name in ("statistics", "probe", "selection", "held_out"):
        tokens = [sum(batch.num_tokens for batch in getattr(data, name)) for data in (whole, *parts)]
        assert tokens[0] == sum(tokens[1:])


def test_padded_lengths_are_what_the_policy_asks_for() -> None:
    """With sequence parallelism, which comes with experts at TP > 1, they are divided among the ranks."""
    data = calibration_data(make_rollouts(), CONFIG, 0, 1, pad_multiple=4)
    batches = [*data.statistics, *data.probe, *data.selection, *data.held_out]
    assert {len(batch.tokens) % 4 for batch in batches} == {0}
    assert any(len(batch.tokens) > batch.num_real for batch in batches)


def test_two_prompts_are_taken_however_few_tokens_are_asked_for() -> None:
    config = CONFIG.model_copy(update={"precision": PrecisionConfig(calibration_tokens=1)})
    data = calibration_data(make_rollouts(3, 5), config, 0, 1)
    parts = (data.statistics, data.selection, data.held_out)
    assert [sum(len(batch.indices) for batch in part) for part in parts] == [2, 1, 1]


def test_long_responses_are_cut() -> None:
    precision = PrecisionConfig(calibration_tokens=600, calibration_length=9)
    data = calibration_data(make_rollouts(), CONFIG.model_copy(update={"precision": precision}), 0, 1)
    for batches in (data.statistics, data.selection, data.held_out):
        assert max(int(batch.lengths.max()) for batch in batches) == 9
    precision = PrecisionConfig(calibration_tokens=600, calibration_length=1)
    data = calibration_data(make_rollouts(), CONFIG.model_copy(update={"precision": precision}), 0, 1)
    assert all(int(batch.mask.sum(1).min()) == int(batch.mask.sum(1).max()) == 1 for batch in data.statistics)


def test_a_recipe_belongs_to_one_model(
    calibrated: tuple[Calibration, Policy, LinearPrecision], model_dir: Path, ranks: Ranks, tmp_path: Path
) -> None:
    found, _, _ = calibrated
    path = tmp_path / "scales.json"
    recipe = recipe_from(found, LLAMA, 4)
    write_recipe(path, recipe, model_dir)
    assert load_recipe(path, model_dir, ranks) == recipe

    other = tmp_path / "other"
    other.mkdir()
    for file in ("config.json", "model.safetensors"):
        (other / file).write_bytes((model_dir / file).read_bytes())
    assert load_recipe(path, other, ranks) == recipe
    with (other / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"\x7f")
    with pytest.raises(ValueError, match="made for another policy"):
        load_recipe(path, other, ranks)


def test_table(calibrated: tuple[Calibration, Policy, LinearPrecision], tmp_path: Path) -> None:
    found, _, _ = calibrated
    write_layers(tmp_path / "layers.arrow", found.rows)
    with pa.memory_map(str(tmp_path / "layers.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.num_rows == 16
    assert {"name", "flops_per_token", "kl_alone", "precision"} == set(table.column_names)
