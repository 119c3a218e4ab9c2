"""An engine in emulated FP8: the trainer's numbers, speculation that changes no token, and nothing silently in BF16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
import torch
from megatron.core import parallel_state
from torch import Tensor

from specrl.config import Config, PolicyConfig, PrecisionConfig
from specrl.distributed import join
from specrl.models.families import LLAMA
from specrl.precision.recipe import KvScales, NotQuantisedError, Recipe, engine_name
from specrl.rollout.engine import Engine, start_engine
from specrl.rollout.errors import PolicyParityError
from specrl.rollout.vllm.precision import EnginePrecision, has_fp8_kv_cache
from specrl.training.batches import TokenSequence, pack
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy
from tests.exactness.engines import in_batches, logprobs_of, mixed_requests, verify_policy
from tests.exactness.toy import (
    LAYERS,
    drafter_weights,
    policy_weights,
    toy_config,
    write_drafter,
    write_policy,
)
from tests.integration.test_refit import SEQUENCES, trainer_logprobs

KEPT = "layers.2.linear_fc2"
RECIPE = Recipe(
    LLAMA, LAYERS, frozenset([KEPT]), kv_scales=KvScales([0.02] * LAYERS, [0.01] * LAYERS, [0.005] * LAYERS)
)
REQUESTS = mixed_requests(42)


def fp8_config(**precision: Any) -> Config:
    """Weights of the toy have sides that 128 does not divide: its queries, keys and values share blocks if fused."""
    return toy_config("eagle3", 3).model_copy(update={"precision": PrecisionConfig(generation="fp8", **precision)})


@dataclass
class Pair:
    engine: Engine
    policy: Policy
    precision: LinearPrecision
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("fp8")
    return write_policy(root / "policy", policy_weights(0)), write_drafter(root / "drafter", drafter_weights(1))


@pytest.fixture(scope="module")
def pair(directories: tuple[Path, Path]) -> Iterator[Pair]:
    """Engine and trainer of one policy in one process, both in FP8; the engine has been refitted from the trainer."""
    ranks = join()
    precision = LinearPrecision(RECIPE.bf16_layers)
    policy = Policy(
        directories[0], PolicyConfig(), dtype="float32", ranks=ranks, trainable=False, seed=0, fp8=precision
    )
    engine = Engine(*directories, config=fp8_config(), seed=0, recipe=RECIPE)
    weights = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    engine.refit(weights.items(), None)
    yield Pair(engine, policy, precision, weights)
    engine.shutdown()
    parallel_state.destroy_model_parallel()  # the process group stays: other files' engines are in it


@pytest.mark.engine
def test_every_linear_layer_computes_what_the_trainers_does(pair: Pair) -> None:
    assert pair.engine.mode == pair.precision.mode == "emulated"
    generator = torch.Generator().manual_seed(3)
    for name, linear in pair.precision.linears.items():
        layer: Any = pair.engine.policy.get_submodule(engine_name(LLAMA, name))
        x = torch.randn(9, linear.module.weight.shape[1], generator=generator) * 3
        with torch.inference_mode():
            engine = layer.quant_method.apply(layer, x)
            trainer = linear(x, linear.module.weight)
        if linear.order is not None:
            trainer = trainer[:, linear.order]
        torch.testing.assert_close(engine, trainer, rtol=1e-5, atol=1e-5)
        weight = linear.module.weight if linear.order is None else linear.module.weight[linear.order]
        plain = torch.nn.functional.linear(x, weight)
        assert 0.01 < float((engine - plain).norm() / plain.norm()) < 0.06


@pytest.mark.engine
def test_both_engines_give_the_same_log_probs(pair: Pair) -> None:
    """Up to values that lie so near the middle of two FP8 numbers that another order of additions tips them over."""
    batches = pack([TokenSequence(tokens, 1, i) for i, tokens in enumerate(SEQUENCES)], 40)
    trainer: dict[int, list[float]] = {}
    for batch, logprobs in zip(batches, pair.policy.logprobs(batches), strict=True):
        trainer |= {index: logprobs[row][batch.mask[row]].tolist() for row, index in enumerate(batch.indices)}
    found = logprobs_of(pair.engine, SEQUENCES)
    same = mean_difference(found, [trainer[index] for index in range(len(SEQUENCES))])
    assert same < 0.01
    assert mean_difference(found, trainer_logprobs(pair.weights, tied=False)) > 3 * same


def mean_difference(one: list[list[float]], other: list[list[float]]) -> float:
    pairs = [(a, b) for row, wanted in zip(one, other, strict=True) for a, b in zip(row, wanted, strict=True)]
    return fmean(abs(a - b) for a, b in pairs)


@pytest.mark.engine
def test_speculation_changes_no_token(pair: Pair) -> None:
    engine = pair.engine
    engine.set_k(0)
    plain = engine.generate(REQUESTS).responses
    engine.set_k(3)
    speculative = engine.generate(REQUESTS)
    assert speculative.stats.num_accepted_tokens > 50
    one_by_one = in_batches(engine, REQUESTS[:14], 3)
    assert [response.tokens for response in speculative.responses] == [response.tokens for response in plain]
    assert [response.tokens for response in one_by_one] == [response.tokens for response in plain[:14]]


@pytest.mark.engine
def test_nothing_but_the_recipes_layers_is_quantised(pair: Pair) -> None:
    engine = pair.engine
    engine.generate(REQUESTS[:2])
    engine.assert_quantised()
    verify_policy(engine, pair.weights.items())
    drafter = {name for name, module in engine.drafter.named_modules() if "Fp8" in method_name(module)}
    policy = {name for name, module in engine.policy.named_modules() if "Fp8" in method_name(module)}
    assert not drafter
    assert policy == set(RECIPE.engine_layers)
    assert engine_name(LLAMA, KEPT) not in policy


@pytest.mark.engine
@pytest.mark.parametrize("what", ["quantise_matrix", "quantise_inputs"])
def test_weights_or_activations_that_are_not_quantised_are_noticed(
    pair: Pair, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the layer's weights or what is expected of its inputs is not rounded."""
    engine, name = pair.engine, "model.layers.1.mlp.gate_up_proj"
    layer: Any = engine.policy.get_submodule(name)
    quantise = getattr(layer.quant_method, what)
    calls: list[bool] = []

    def skipped_at_first(values: Tensor) -> Tensor:
        calls.append(True)
        return values.clone() if len(calls) == 1 else quantise(values)

    with monkeypatch.context() as patch:
        patch.setattr(layer.quant_method, what, skipped_at_first)
        if what == "quantise_matrix":
            engine.refit(pair.weights.items(), None)
        with pytest.raises(PolicyParityError, match=r"layers\.1\.mlp\.gate_proj"):
            verify_policy(engine, pair.weights.items())
    engine.refit(pair.weights.items(), None)
    verify_policy(engine, pair.weights.items())


@pytest.mark.engine
def test_a_layer_in_the_wrong_precision_is_an_error_with_its_name(pair: Pair) -> None:
    engine = pair.engine
    engine.generate(REQUESTS[:2])
    engine.assert_quantised()
    recipe, engine.precision.recipe = engine.precision.recipe, Recipe(LLAMA, LAYERS)
    with pytest.raises(NotQuantisedError, match=r"layers\.2\.mlp\.down_proj of the engine computes in BF16"):
        engine.assert_quantised()
    engine.precision.recipe = recipe


@pytest.mark.engine
@pytest.mark.skipif(not has_fp8_kv_cache(), reason="vLLM has no FP8 KV cache on this device")
def test_an_fp8_kv_cache_keeps_its_scales_through_refits_and_changes_no_token(directories: tuple[Path, Path]) -> None:
    config = toy_config("eagle3", 3).model_copy(update={"precision": PrecisionConfig(kv_cache="fp8")})
    engine = Engine(*directories, config=config, seed=0, recipe=RECIPE)
    assert engine.mode == "off"
    attention: Any = engine.policy.get_submodule("model.layers.3.self_attn.attn")
    drafter: Any = engine.drafter.get_submodule("model.layers.0.self_attn.attn")
    assert (attention.kv_cache.dtype, drafter.kv_cache.dtype) == (torch.uint8, torch.float32)
    before = logprobs_of(engine, SEQUENCES)
    weights = policy_weights(0)
    engine.refit(weights.items(), None)
    assert (attention._k_scale_float, attention._v_scale_float) == (0.01, 0.005)
    assert logprobs_of(engine, SEQUENCES) == before
    newer = KvScales([0.5] * LAYERS, [0.5] * LAYERS, [0.5] * LAYERS)
    engine.refit(weights.items(), None, kv_scales=newer)
    assert (attention._k_scale_float, attention._v_scale_float) == (0.5, 0.5)
    assert logprobs_of(engine, SEQUENCES) != before
    engine.precision.restore(KvScales([0.25] * LAYERS, [0.25] * LAYERS, [0.125] * LAYERS))  # of a run that goes on
    engine.refit(weights.items(), None)
    assert (attention._k_scale_float, attention._v_scale_float) == (0.25, 0.125)
    engine.set_k(0)
    plain = [response.tokens for response in engine.generate(REQUESTS[:14]).responses]
    engine.set_k(3)
    assert [response.tokens for response in engine.generate(REQUESTS[:14]).responses] == plain
    engine.assert_quantised()
    attention._k_scale.fill_(1.0)
    with pytest.raises(NotQuantisedError, match=r"layer 3 of the engine stores k in FP8 with the scale 1, not 0\.25"):
        engine.assert_quantised()
    engine.shutdown()


def test_what_cannot_be_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    if has_fp8_kv_cache():
        with pytest.raises(ValueError, match=r'precision\.kv_cache = "fp8" needs scales'):
            EnginePrecision(PrecisionConfig(kv_cache="fp8"), Recipe(LLAMA, LAYERS)).loaded(torch.nn.Module(), None)
    for name in ("_is_avx512_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r'precision\.kv_cache = "fp8": this device has no FP8 KV cache'):
        EnginePrecision(PrecisionConfig(kv_cache="fp8"), RECIPE)


@pytest.mark.parametrize("kernel", ["CutlassFp8BlockScaledMMKernel", "MarlinFP8ScaledMMLinearKernel"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_a_native_layer_is_judged_by_its_weight_and_kernel(kernel: str, dtype: torch.dtype) -> None:
    """vLLM's own method stands in both for FP8 and for what it falls back to on older devices."""
    method = type("Fp8PerBlockOnlineLinearMethod", (), {"fp8_linear": type(kernel, (), {})()})()
    model, recipe = torch.nn.Module(), Recipe(LLAMA, 1)
    precision = EnginePrecision(PrecisionConfig(generation="fp8"), recipe)
    for name in recipe.engine_layers:
        *parents, leaf = name.split(".")
        parent = model
        for part in parents:
            if part not in dict(parent.named_children()):
                parent.add_module(part, torch.nn.Module())
            parent = parent.get_submodule(part)
        layer: Any = torch.nn.Module()
        layer.weight, layer.quant_method = torch.zeros(2, 2).to(dtype), method
        parent.add_module(leaf, layer)
    if dtype == torch.float8_e4m3fn and kernel.startswith("Cutlass"):
        precision.assert_quantised(model)
        assert precision.mode(model) == "native"
        return
    with pytest.raises(NotQuantisedError, match=r"^model\.layers\.0\.\S+ of the engine (computes|holds)"):
        precision.assert_quantised(model)
    assert precision.mode(model) == "off"


def test_an_fp8_engine_without_a_recipe_is_refused(directories: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=r"has no precision\.json: .*silently compute in BF16; train it with"):
        start_engine(fp8_config(), *directories)


def method_name(module: torch.nn.Module) -> str:
    return type(getattr(module, "quant_method", None)).__name__
