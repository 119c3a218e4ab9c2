"""Mixtures of experts in the trainer: what it computes, what it holds, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from specrl.config import ConfigError, ModelConfig, PolicyConfig, PrecisionConfig
from specrl.config.model import TinyModelConfig
from specrl.distributed import Ranks, join, leave
from specrl.models.families import FAMILIES
from specrl.models.shapes import model_shape
from specrl.models.sources import check_source, materialise_model
from specrl.precision.recipe import (
    Recipe,
    edge_layers,
    engine_name,
    layer_names,
    load_recipe,
    write_recipe,
)
from specrl.training.batches import TokenSequence, pack
from specrl.training.calibration import calibrate, calibration_data, recipe_from
from specrl.training.megatron.fp8 import LinearPrecision, layer_of
from specrl.training.megatron.model import check_supported
from specrl.training.megatron.policy import Policy
from specrl.training.megatron.weights import WeightMap, weight_map
from tests.unit.test_calibration import CONFIG as CALIBRATION
from tests.unit.test_calibration import make_rollouts
from tests.unit.test_fp8 import fp8_lines

# isort: split
from megatron.core import parallel_state

TOKENS = [4 + i * 7 % 90 for i in range(40)]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
SHAPE = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def tiny(**shape: Any) -> ModelConfig:
    tiny = TinyModelConfig(family="qwen3_moe", **EXPERTS, **shape)
    return ModelConfig(source="tiny", dtype="float32", max_length=128, tiny=tiny)


def moe_config(**changes: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**{**SHAPE, **EXPERTS, "num_key_value_heads": 4, **changes})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialise_model(tiny(), 0, tmp_path_factory.mktemp("experts") / "model")


@pytest.mark.parametrize("normalised", [True, False], ids=["weights of the chosen add up to 1", "weights of all do"])
@torch.no_grad()
def test_the_policy_computes_what_transformers_does_and_gives_the_same_bits_back(
    policy_dir: Path, ranks: Ranks, tmp_path: Path, normalised: bool
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(policy_dir / "model.safetensors")
    config = json.loads((policy_dir / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "norm_topk_prob": normalised}))
    policy = Policy(directory, PolicyConfig(), dtype="float32", ranks=ranks, seed=0, trainable=False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    [found] = policy.logprobs(pack([TokenSequence(TOKENS, 1, 0)], len(TOKENS)))
    logits = model(torch.tensor([TOKENS])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(found[0], expected, atol=2e-5, rtol=0)
    policy.save_pretrained(tmp_path / "saved")
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "saved"))
    assert before.keys() == after.keys() and "model.layers.5.mlp.experts.7.gate_proj.weight" in before
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_the_gradients_are_those_of_transformers(policy_dir: Path, ranks: Ranks) -> None:
    """Experts, router and attention, seen in one norm and in where a step of plain size moves each weight."""
    policy = Policy(policy_dir, PolicyConfig(clip_grad=1e9), dtype="float32", ranks=ranks, seed=0)
    batches = pack([TokenSequence(TOKENS, 1, 0)], len(TOKENS))
    metrics, _ = policy.train_step(batches, lambda logprobs, _, batch: (-(logprobs * batch.mask).sum(), {}))
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    logits = model(torch.tensor([TOKENS])).logits[0, :-1]
    (-logits.log_softmax(-1).gather(-1, torch.tensor(TOKENS[1:])[:, None]).sum()).backward()
    norms = torch.stack([parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None])
    assert metrics["grad_norm"] == pytest.approx(float(norms.norm()), rel=1e-4)


def test_the_plan_counts_the_parameters_that_transformers_makes(policy_dir: Path) -> None:
    shape = model_shape(tiny())
    parameters = AutoModelForCausalLM.from_pretrained(policy_dir).parameters()
    assert shape.parameters == sum(parameter.numel() for parameter in parameters)
    assert shape.parameters - shape.active_parameters == 6 * 6 * 3 * 128 * 96
    assert model_shape(ModelConfig(source=str(policy_dir), max_length=128)) == shape


def names_of(expert_parallel: int, *, transformer_engine: bool) -> WeightMap:
    sizes = {"pipeline_parallel": 2, "expert_parallel": expert_parallel}
    return weight_map(moe_config(), **sizes, transformer_engine=transformer_engine)


def test_each_expert_has_one_rank_of_each_group() -> None:
    one, four = (names_of(size, transformer_engine=False).parameters for size in (1, 4))
    assert [parameter.hf for parameter in one] == [parameter.hf for parameter in four]
    experts = [parameter for parameter in four if parameter.expert_rank is not None]
    assert {parameter.expert_rank for parameter in experts} == {0, 1, 2, 3}
    [fifth] = [parameter for parameter in experts if parameter.hf == ("model.layers.3.mlp.experts.5.down_proj.weight",)]
    assert (fifth.name, fifth.stage) == ("decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight", 1)
    assert (fifth.expert_rank, fifth.shapes) == (2, ((64, 96),))


def test_transformer_engine_has_one_module_for_the_experts_of_a_rank() -> None:
    names = {parameter.name for parameter in names_of(4, transformer_engine=True).parameters}
    layer = {name.removeprefix("decoder.layers.1.") for name in names if name.startswith("decoder.layers.1.")}
    assert layer == {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        *(f"mlp.experts.linear_fc{number}.weight{expert}" for number in (1, 2) for expert in (0, 1)),
    }


@pytest.mark.parametrize(
    ("config", "expert_parallel", "message"),
    [
        (moe_config(mlp_only_layers=[0]), 1, r"mlp_only_layers = \[0\]"),
        (moe_config(decoder_sparse_step=2), 1, "decoder_sparse_step = 2"),
        (moe_config(), 3, r"policy.expert_parallel = 3 .* the 8 experts of the model"),
        (Qwen3Config(**SHAPE, num_key_value_heads=4), 2, r"policy.expert_parallel = 2: .* no experts"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    config: Qwen3Config | Qwen3MoeConfig, expert_parallel: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_supported(config, PolicyConfig(expert_parallel=expert_parallel))


def test_a_directory_with_dense_layers_is_refused_on_the_login_node(policy_dir: Path, tmp_path: Path) -> None:
    config = json.loads((policy_dir / "config.json").read_text()) | {"mlp_only_layers": [0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{tmp_path}: .* every layer must have experts"):
        check_source(ModelConfig(source=str(tmp_path), max_length=128))


def test_the_router_is_no_layer_that_fp8_applies_to() -> None:
    family = FAMILIES["qwen3_moe"]
    assert family.router is not None
    assert family.router.megatron not in {linear.megatron for linear in family.linears}


def test_fp8_takes_the_experts_of_a_layer_as_one_and_leaves_the_router(policy_dir: Path, ranks: Ranks) -> None:
    """All their matrices, forward and backward, as the engine has them in one module."""
    family, precision = FAMILIES["qwen3_moe"], LinearPrecision(["layers.1.experts"])
    policy = Policy(policy_dir, PolicyConfig(), dtype="bfloat16", ranks=ranks, seed=0, fp8=precision)
    batches = pack([TokenSequence(TOKENS, 1, 0)], len(TOKENS))
    policy.train_step(batches, lambda logprobs, _, batch: (-(logprobs * batch.mask).sum(), {}))
    policy.logprobs(batches)
    precision.assert_quantised(trained=True)
    assert {layer_of(name) for name in precision.linears} == set(layer_names(family, 6)) - {"layers.1.experts"}
    assert len(precision.linears) == 6 * 2 + 5 * 8 * 2 and "layers.5.experts.7.linear_fc2" in precision.linears
    recipe = Recipe(family, 6, bf16_layers=frozenset(["layers.1.experts"]))
    assert [engine_name(family, name) for name in recipe.kept_layers] == ["model.layers.1.mlp.experts"]
    assert len(set(recipe.engine_layers)) == 3 * 6 - 1
    assert not any("gate" in name or "router" in name for name in recipe.engine_layers)


def test_the_calibration_takes_the_experts_of_a_layer_as_one(policy_dir: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Their FLOPs count together, their layer is chosen as a whole, and the recipe goes through its file."""
    switch, family = LinearPrecision(emulates=True), FAMILIES["qwen3_moe"]
    config = CALIBRATION.model_copy(update={"precision": PrecisionConfig(calibration_tokens=200)})
    policy = Policy(policy_dir, config.policy, dtype="float32", ranks=ranks, seed=0, trainable=False, fp8=switch)
    kept = edge_layers(family, 6, 1, 1)
    found = calibrate(policy, switch, calibration_data(make_rollouts(4, 1), config, 0, 1), 1.0, ranks, always_bf16=kept)
    rows = {row.name: row for row in found.rows}
    assert rows.keys() == set(layer_names(family, 6)) and set(found.bf16_layers) == set(kept)
    assert 0 < found.kl_chosen < found.kl_all_fp8
    assert rows["layers.3.experts"].flops_per_token == 2 * 2 * 3 * 128 * 96  # of both experts of a token
    assert all(row.kl_alone > 0 for row in found.rows)
    linears = switch.linears.items()
    assert {layer_of(name) for name, linear in linears if linear.active} == set(layer_names(family, 6))
    recipe = recipe_from(found, family, 6)
    write_recipe(tmp_path / "scales.json", recipe, policy_dir)
    assert load_recipe(tmp_path / "scales.json", policy_dir, ranks) == recipe
    assert "model.layers.3.mlp.experts" in recipe.engine_layers


def test_the_engine_must_not_cut_an_expert_through_a_block() -> None:
    assert fp8_lines(moe_config(moe_intermediate_size=256), 2, 2) == []
    (line,) = fp8_lines(moe_config(moe_intermediate_size=256), 4, 4)
    assert re.match("engine.tensor_parallel = 4: .* 256 rows of an expert", line)
