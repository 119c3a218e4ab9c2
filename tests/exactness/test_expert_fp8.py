"""A mixture of experts in emulated FP8, in the engine and in the trainer: the same numbers, and never the router."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
import torch
from megatron.core import parallel_state
from transformers import AutoModelForCausalLM

from specrl.config import PolicyConfig, PrecisionConfig
from specrl.distributed import join
from specrl.models.families import FAMILIES
from specrl.precision.recipe import NotQuantisedError, Recipe, engine_name, layer_names
from specrl.rollout.engine import Engine
from specrl.rollout.errors import PolicyParityError
from specrl.rollout.vllm.precision import EnginePrecision, native_flaw
from specrl.training.batches import TokenSequence, pack
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy
from tests.exactness.engines import in_batches, logprobs_of, mixed_requests, verify_policy
from tests.exactness.experts import LAYERS, write_expert_drafter, write_expert_policy
from tests.exactness.test_fp8 import Pair, mean_difference, method_name
from tests.exactness.toy import toy_config
from tests.integration.test_refit import SEQUENCES

FAMILY = FAMILIES["qwen3_moe"]
KEPT = frozenset(["layers.2.experts", "layers.4.linear_qkv"])
RECIPE = Recipe(FAMILY, LAYERS, KEPT)
EXPERTS = "model.layers.1.mlp.experts"
REQUESTS = mixed_requests(28)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("experts")
    return [write_expert_policy(root / f"policy-{seed}", seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def pair(directories: list[Path]) -> Iterator[Pair]:
    """Engine and trainer of one policy in one process, both in FP8; the engine began with another policy's weights."""
    ranks, precision = join(), LinearPrecision(KEPT)
    policy = Policy(
        directories[0], PolicyConfig(), dtype="float32", ranks=ranks, trainable=False, seed=0, fp8=precision
    )
    drafter = write_expert_drafter(directories[1].parent / "drafter", directories[1])
    config = toy_config("eagle3", 3).model_copy(update={"precision": PrecisionConfig(generation="fp8")})
    engine = Engine(directories[1], drafter, config=config, seed=0, recipe=RECIPE)
    weights = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    engine.refit(weights.items(), None)
    yield Pair(engine, policy, precision, weights)
    engine.shutdown()
    parallel_state.destroy_model_parallel()  # the process group stays: other files' engines are in it


def trainer_logprobs(policy: Policy) -> list[list[float]]:
    batches = pack([TokenSequence(tokens, 1, i) for i, tokens in enumerate(SEQUENCES)], 40)
    found: dict[int, list[float]] = {}
    for batch, logprobs in zip(batches, policy.logprobs(batches), strict=True):
        found |= {index: logprobs[row][batch.mask[row]].tolist() for row, index in enumerate(batch.indices)}
    return [found[index] for index in sorted(found)]


@torch.no_grad()
def plain_logprobs(policy_dir: Path) -> list[list[float]]:
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    rows = []
    for tokens in SEQUENCES:
        logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        rows.append(logprobs.gather(-1, torch.tensor(tokens)[1:, None])[:, 0].tolist())
    return rows


@pytest.mark.engine
def test_both_engines_give_the_same_log_probs_after_a_refit(pair: Pair, directories: list[Path]) -> None:
    assert pair.engine.mode == pair.precision.mode == "emulated"
    found = logprobs_of(pair.engine, SEQUENCES)
    same, bf16 = (
        mean_difference(found, other) for other in (trainer_logprobs(pair.policy), plain_logprobs(directories[0]))
    )
    pair.precision.assert_quantised()
    assert same < 0.01
    assert bf16 > 10 * same


@pytest.mark.engine
def test_every_expert_computes_what_the_trainers_does(pair: Pair) -> None:
    layer: Any = pair.engine.policy.get_submodule(f"{EXPERTS}.routed_experts")
    generator = torch.Generator().manual_seed(3)
    for expert in range(layer.global_num_experts):
        fc1, fc2 = (pair.precision.linears[f"layers.1.experts.{expert}.linear_fc{number}"] for number in (1, 2))
        x = torch.randn(9, fc1.module.weight.shape[1], generator=generator) * 3
        gates = torch.tensor([[0.75, 0.0]]).expand(9, 2)
        ids = torch.tensor([[expert, (expert + 1) % layer.global_num_experts]], dtype=torch.int32).expand(9, 2)
        with torch.inference_mode():
            found = layer.quant_method.apply(layer, x, gates, ids, None, None)
            gate, up = fc1(x, fc1.module.weight).chunk(2, -1)
            expected = fc2(torch.nn.functional.silu(gate) * up * 0.75, fc2.module.weight)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        gate, up = (x @ fc1.module.weight.detach().t()).chunk(2, -1)
        plain = torch.nn.functional.silu(gate) * up * 0.75 @ fc2.module.weight.detach().t()
        assert 0.01 < float((found - plain).norm() / plain.norm()) < 0.1


@pytest.mark.engine
def test_speculation_changes_no_token(pair: Pair) -> None:
    """A token's experts compute the same bits, however many tokens share them."""
    engine = pair.engine
    engine.set_k(0)
    plain = engine.generate(REQUESTS).responses
    engine.set_k(3)
    speculative = engine.generate(REQUESTS)
    assert speculative.stats.num_draft_tokens > 50
    one_by_one = in_batches(engine, REQUESTS[:9], 2)
    assert [response.tokens for response in speculative.responses] == [response.tokens for response in plain]
    assert [response.tokens for response in one_by_one] == [response.tokens for response in plain[:9]]


@pytest.mark.engine
def test_the_recipes_layers_are_quantised_and_the_router_is_not(pair: Pair, directories: list[Path]) -> None:
    engine = pair.engine
    engine.generate(REQUESTS[:2])
    engine.assert_quantised()
    verify_policy(engine, pair.weights.items())
    named = {name for name, module in engine.policy.named_modules() if "Fp8" in method_name(module)}
    assert {name.removesuffix(".routed_experts") for name in named} == set(RECIPE.engine_layers)
    assert len(named) == 3 * LAYERS - 2 and engine_name(FAMILY, "layers.2.experts") == "model.layers.2.mlp.experts"
    assert not any("Fp8" in method_name(module) for module in engine.drafter.modules())
    recipe, engine.precision.recipe = engine.precision.recipe, Recipe(FAMILY, LAYERS)
    with pytest.raises(NotQuantisedError, match=r"layers\.2\.mlp\.experts of the engine computes in BF16"):
        engine.assert_quantised()
    engine.precision.recipe = recipe


@pytest.mark.engine
def test_experts_that_are_not_quantised_or_wrong_are_noticed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pair.engine
    method: Any = engine.policy.get_submodule(f"{EXPERTS}.routed_experts").quant_method
    with monkeypatch.context() as patch:
        patch.setattr(type(method), "process_weights_after_loading", lambda self, layer: None)
        engine.refit(pair.weights.items(), None)
    with pytest.raises(PolicyParityError, match=r"layers\.0\.mlp\.experts\.0\.gate_proj"):
        verify_policy(engine, pair.weights.items())
    engine.refit(pair.weights.items(), None)
    verify_policy(engine, pair.weights.items())
    engine.assert_quantised()
    swapped = [f"{EXPERTS}.{number}.up_proj.weight" for number in (2, 5)]
    wrong = pair.weights | {a: pair.weights[b] for a, b in zip(swapped, reversed(swapped), strict=True)}
    with pytest.raises(PolicyParityError, match=r"experts\.2\.gate_proj"):
        verify_policy(engine, wrong.items())


def test_vllm_is_asked_for_native_fp8_in_the_recipes_layers_and_not_in_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own choice of the method for each layer, which needs no device."""
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    precision = EnginePrecision(PrecisionConfig(generation="fp8"), RECIPE)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        arguments = precision.arguments()
    asked = resolve_quantization_config(arguments["quantization"], arguments["quantization_config"])
    assert asked is not None
    online = OnlineQuantizationConfig(asked)
    methods = {"experts": (RoutedExperts, "Fp8PerBlockOnlineMoEMethod")}
    for name in layer_names(FAMILY, LAYERS):
        layer, expected = methods.get(name.rpartition(".")[2], (LinearBase, "Fp8PerBlockOnlineLinearMethod"))
        found = online.resolve_quant_method_cls(layer, engine_name(FAMILY, name))
        assert (found[-1].__name__ if found else None) == (None if name in KEPT else expected)
    for index in range(LAYERS):
        assert online.resolve_quant_method_cls(LinearBase, f"model.layers.{index}.mlp.gate") is None


@pytest.mark.parametrize("kernel", ["TRITON", "MARLIN"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_native_experts_are_judged_by_their_weights_and_kernel(kernel: str, dtype: torch.dtype) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    method = type("Fp8PerBlockOnlineMoEMethod", (), {"fp8_backend": Fp8MoeBackend[kernel]})()
    layer: Any = torch.nn.Module()
    layer.w13_weight = layer.w2_weight = torch.zeros(2, 2).to(dtype)
    layer.quant_method = method
    model = torch.nn.Module()
    model.add_module("routed_experts", layer)
    is_fp8 = (kernel, dtype) == ("TRITON", torch.float8_e4m3fn)
    assert EnginePrecision(PrecisionConfig(generation="fp8"), RECIPE).mode(model) == ("native" if is_fp8 else "off")
    assert (native_flaw(layer) is None) == is_fp8
