"""Emulated FP8: its arithmetic, its gradients, and that it is never silently off."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specrl.config import Config, ConfigError, PolicyConfig, PrecisionConfig, load_config
from specrl.distributed import Ranks, join, leave
from specrl.models.families import LLAMA
from specrl.models.layout import fp8_problems
from specrl.models.shapes import shape_of
from specrl.precision import native
from specrl.precision.blocks import (
    ALONG_ROWS,
    ALONG_TOKENS,
    E4M3_MAX,
    SQUARE,
    _blocks,
    fake_quantise,
    fake_quantise_rows,
)
from specrl.precision.recipe import NotQuantisedError, Recipe, engine_name, layer_names
from specrl.projection.plan import plan
from specrl.rollout.vllm.precision import EnginePrecision
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import FP8_TOKENS, Policy
from tests.dequantise import dequantise, quantise

BLOCKS = (ALONG_ROWS, ALONG_TOKENS, SQUARE)
E4M3_EPSILON = 2.0**-4
"""Largest relative rounding error of a normal e4m3 value."""


def block_amax(values: Tensor, block: tuple[int, int]) -> Tensor:
    return _blocks(values, block).abs().amax((1, 3))


def spread(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values over many orders of magnitude, so that subnormals occur."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp(4 * torch.randn(rows, columns, generator=generator))
    return (torch.randn(rows, columns, generator=generator) * magnitudes).to(dtype)


@given(
    st.integers(1, 300),
    st.integers(1, 700),
    st.sampled_from(BLOCKS),
    st.sampled_from(["bfloat16", "float32"]),
)
@settings(max_examples=40, deadline=None)
def test_dequantised_values_are_those_of_the_quantised_ones_and_their_scales(
    rows: int, columns: int, block: tuple[int, int], dtype: str
) -> None:
    values = spread(rows, columns, rows * 1000 + columns, getattr(torch, dtype))
    quantised, scales = quantise(values, block)
    assert quantised.dtype == torch.float8_e4m3fn
    assert scales.shape == (-(-rows // block[0]), -(-columns // block[1]))
    expected = dequantise(quantised, scales, block, values.dtype)
    assert torch.equal(fake_quantise(values, block), expected)


def test_every_e4m3_value_and_every_tie_rounds_as_the_cast_does() -> None:
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[grid.isfinite()].sort().values
    ties = (grid[1:] + grid[:-1]) / 2
    values = torch.cat((grid, ties, ties * 1.0001, ties * 0.9999)).clamp(-E4M3_MAX, E4M3_MAX)
    blocks = torch.cat((values[:, None], torch.full((len(values), 1), E4M3_MAX)), 1)  # so that the scale is 1
    assert torch.equal(fake_quantise(blocks, ALONG_ROWS)[:, 0], values.to(torch.float8_e4m3fn).float())


def test_an_outlier_costs_only_its_own_block() -> None:
    values = torch.randn(256, 576, generator=torch.Generator().manual_seed(1))
    clean = fake_quantise(values, SQUARE)
    values[3, 5] = 1e6
    dirty = fake_quantise(values, SQUARE)
    assert torch.equal(clean[:, 128:], dirty[:, 128:])
    assert torch.equal(clean[128:], dirty[128:])
    assert not torch.equal(clean[:128, :128], dirty[:128, :128])


def test_normal_values_keep_their_relative_error() -> None:
    values = torch.randn(200, 576, generator=torch.Generator().manual_seed(2))
    normal = values.abs() > block_amax(values, ALONG_ROWS).max() * 2.0**-6 / E4M3_MAX
    error = (fake_quantise(values, ALONG_ROWS) - values).abs() / values.abs()
    assert float(error[normal].max()) <= E4M3_EPSILON * (1 + 1e-5)


def test_matrices_below_each_other_have_blocks_of_their_own() -> None:
    values = spread(330, 200, seed=5)
    parts = [fake_quantise(part, SQUARE) for part in values.split([200, 65, 65])]
    assert torch.equal(fake_quantise_rows(values, [200, 65, 65]), torch.cat(parts))
    assert torch.equal(fake_quantise_rows(values, [256, 74]), fake_quantise(values, SQUARE))


def test_shards_that_cut_blocks_are_refused_only_where_the_engines_differ() -> None:
    odd = LlamaConfig(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    assert fp8_lines(odd, 2, 2) == []
    (line,) = fp8_lines(odd, 1, 2)
    assert re.match(r"policy\.tensor_parallel = 1 and engine\.tensor_parallel = 2 .*use equal", line)
    assert fp8_lines(LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32), 4, 2) == []


def test_heads_that_share_blocks_are_refused_on_gpus_alone_and_before_a_job() -> None:
    narrow = LlamaConfig(hidden_size=256)
    on_gpus = ["resources.gpus_per_rank=1", "resources.gpu_memory_gib=80"]
    (line,) = fp8_lines(narrow, 1, 1, on_gpu=True)
    assert line.startswith('precision.training = "fp8" on a GPU: heads of 8 channels')
    assert fp8_lines(narrow, 1, 1) == []
    assert fp8_lines(LlamaConfig(hidden_size=256, num_attention_heads=2), 1, 1, on_gpu=True) == []
    with pytest.raises(ConfigError, match="on a GPU: heads of 32 channels"):  # of configs/smoke.toml
        plan(fp8_config(1, 1, *on_gpus))


def fp8_lines(hf: Any, trainer: int, engine: int, *, on_gpu: bool = False) -> list[str]:
    """What layouts in FP8 with these tensor-parallel sizes are told about a model."""
    architecture = type(hf).__name__.replace("Config", "ForCausalLM")
    shape = shape_of(hf.to_dict() | {"architectures": [architecture]})
    return list(fp8_problems(fp8_config(trainer, engine), shape, on_gpu=on_gpu))


def fp8_config(trainer: int, engine: int, *overrides: str) -> Config:
    sizes = [f"policy.tensor_parallel={trainer}", f"engine.tensor_parallel={engine}", "resources.ranks_per_node=4"]
    fp8 = ["precision.generation=fp8", "precision.training=fp8", "stage_resources.train.ranks_per_node=4"]
    return load_config(Path(__file__).parents[2] / "configs" / "smoke.toml", [*sizes, *fp8, *overrides])


def test_the_engine_knows_the_layers_by_its_own_names() -> None:
    recipe = Recipe(LLAMA, 2, frozenset(["layers.1.linear_fc1"]))
    assert engine_name(LLAMA, "layers.1.linear_qkv") == "model.layers.1.self_attn.qkv_proj"
    assert len(recipe.engine_layers) == 7
    assert "model.layers.1.mlp.gate_up_proj" not in recipe.engine_layers


def test_zeros_stay_zero_and_nan_is_not_hidden() -> None:
    values = torch.zeros(3, 200)
    assert torch.equal(fake_quantise(values, ALONG_ROWS), values)
    values[1, 150] = float("nan")
    assert fake_quantise(values, ALONG_ROWS)[1, 150].isnan()


# In a policy


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that 128 does not divide."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=192,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    directory = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def make_policy(
    model_dir: Path, ranks: Ranks, fp8: LinearPrecision | None, *, dtype: str = "bfloat16", trainable: bool = True
) -> Policy:
    config = PolicyConfig(lr=1e-3)
    return Policy(model_dir, config, dtype=dtype, ranks=ranks, seed=1, fp8=fp8, trainable=trainable)


def make_batches() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(4)
    sequences = [
        TokenSequence(torch.randint(0, 64, (length,), generator=generator).tolist(), 3, index)
        for index, length in enumerate((20, 31, 26, 17))
    ]
    return pack(sequences, tokens_per_micro_batch=64)


def mean_loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs[batch.mask].sum() / 80, {}


def test_an_fp8_policy_quantises_every_linear_layer(model_dir: Path, ranks: Ranks) -> None:
    precision = LinearPrecision()
    assert precision.mode == "off"
    policy = make_policy(model_dir, ranks, precision)
    assert policy.pad_multiple == 1  # nothing but native FP8 needs padding
    assert precision.mode == "emulated"
    assert set(precision.linears) == set(layer_names(LLAMA, 3))
    batches = make_batches()
    quantised = policy.logprobs(batches)
    precision.assert_quantised()
    plain = make_policy(model_dir, ranks, None).logprobs(batches)
    difference = torch.cat([(a - b).abs().flatten() for a, b in zip(quantised, plain, strict=True)])
    assert 0.0 < float(difference.mean()) < 0.5


@pytest.mark.parametrize("updates", [0, 2])
def test_the_output_is_that_of_layers_computed_by_hand(model_dir: Path, ranks: Ranks, updates: int) -> None:
    """After updates too, whose weights Megatron's optimizer writes through a flat buffer."""
    precision = LinearPrecision()
    policy = make_policy(model_dir, ranks, precision, trainable=updates > 0)
    for _ in range(updates):
        policy.train_step(make_batches(), mean_loss)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name, linear in precision.linears.items():
        linear.module.register_forward_hook(
            lambda module, args, output, name=name: seen.update(
                {name: (args[0].flatten(0, 1).clone(), output[0].flatten(0, 1).clone())}
            )
        )
    policy.logprobs(make_batches())
    precision.assert_quantised(trained=updates > 0)
    assert set(seen) == set(layer_names(LLAMA, 3))
    for name, (x, y) in seen.items():
        weight = by_hand(name, precision.linears[name].module.weight.detach())
        inputs, input_scales = quantise(x, ALONG_ROWS)
        torch.testing.assert_close(y, dequantise(inputs, input_scales, ALONG_ROWS, x.dtype) @ weight.t())
        assert torch.equal(precision.linears[name].quantised_weight(), weight)


def by_hand(name: str, weight: Tensor) -> Tensor:
    """The quantised weight of `model_dir`, its matrices as they lie on disk: 2 groups of 3 queries, 1 key, 1 value."""

    def rounded(part: Tensor) -> Tensor:
        values, scales = quantise(part, SQUARE)
        return dequantise(values, scales, SQUARE, part.dtype)

    if name.endswith("fc1"):
        return torch.cat([rounded(part) for part in weight.chunk(2)])
    if not name.endswith("qkv"):
        return rounded(weight)
    groups = weight.view(2, 5, 32, 192)
    parts = [groups[:, :3], groups[:, 3:4], groups[:, 4:]]
    return torch.cat([rounded(part.flatten(0, 2)).view(part.shape) for part in parts], 1).flatten(0, 2)


def test_layers_kept_in_bf16_compute_as_before(model_dir: Path, ranks: Ranks) -> None:
    batches = make_batches()
    plain = make_policy(model_dir, ranks, None, trainable=False).logprobs(batches)
    precision = LinearPrecision(layer_names(LLAMA, 3))
    kept = make_policy(model_dir, ranks, precision, trainable=False).logprobs(batches)
    assert precision.mode == "off"
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


def test_fp8_training_learns_as_bf16_does(model_dir: Path, ranks: Ranks) -> None:
    losses = {}
    for name, precision in (("bf16", None), ("fp8", LinearPrecision())):
        policy = make_policy(model_dir, ranks, precision)
        losses[name] = [policy.train_step(make_batches(), mean_loss)[0]["loss"] for _ in range(12)]
    assert losses["fp8"][-1] < 0.7 * losses["fp8"][0]
    assert losses["fp8"][:2] == pytest.approx(losses["bf16"][:2], rel=0.05)
    assert losses["fp8"] != losses["bf16"]


def test_gradients_are_those_of_quantised_operands(model_dir: Path, ranks: Ranks) -> None:
    precision = LinearPrecision()
    make_policy(model_dir, ranks, precision, dtype="float32")
    linear = precision.linears["layers.0.linear_fc2"]
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(37, 5, 160, generator=generator, requires_grad=True)
    grad = 1e-7 * torch.randn(37, 5, 192, generator=generator)
    weight = linear.module.weight.detach().clone().requires_grad_()
    linear(x, weight).backward(grad)
    flat, flat_grad = x.detach().flatten(0, 1), grad.flatten(0, 1)
    assert x.grad is not None and weight.grad is not None
    by_rows = fake_quantise(flat_grad, ALONG_ROWS) @ fake_quantise(weight.detach(), SQUARE)
    by_tokens = fake_quantise(flat_grad, ALONG_TOKENS).t() @ fake_quantise(flat, ALONG_TOKENS)
    torch.testing.assert_close(x.grad.flatten(0, 1), by_rows)
    torch.testing.assert_close(weight.grad, by_tokens)
    exact = flat_grad @ weight.detach()
    error = float((by_rows - exact).norm() / exact.norm())
    assert 0.005 < error < 0.08


def test_a_layer_that_was_not_quantised_is_an_error_with_its_name(model_dir: Path, ranks: Ranks) -> None:
    with pytest.raises(NotQuantisedError, match="no policy has taken"):
        LinearPrecision().assert_quantised()
    precision = LinearPrecision()
    policy = make_policy(model_dir, ranks, precision, trainable=False)
    with pytest.raises(NotQuantisedError, match=r"layers\.0\.linear_fc1 has run no forward"):
        precision.assert_quantised()
    policy.logprobs(make_batches())
    precision.assert_quantised()
    with pytest.raises(NotQuantisedError, match="has run no backward"):
        precision.assert_quantised(trained=True)
    linear = precision.linears["layers.2.linear_proj"]
    del linear.module._forward_impl  # Megatron's own is back
    with pytest.raises(NotQuantisedError, match=r"layers\.2\.linear_proj computes in the model's own precision"):
        precision.assert_quantised()


def test_native_fp8_is_neither_emulated_nor_left_out_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        native.check_training()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipes := transformer_engine_recipes())
    monkeypatch.delenv(native.FP32_SCALES, raising=False)
    native.check_training()
    assert os.environ[native.FP32_SCALES] == "1"
    made = recipes.Float8BlockScaling(fp8_format="e4m3")
    assert [getattr(made, name) for name in native.QUANTISERS] == [recipes.QParams(False, 0.0)] * 3
    monkeypatch.setattr(recipes.Float8BlockScaling, "resets", True)
    with pytest.raises(ValueError, match=r"keeps its own scales in fp8_quant_fwd_inp: start specrl with .*SCALES=1 in"):
        native.set_scales()
    monkeypatch.setenv(native.FP32_SCALES, "0")
    with pytest.raises(ValueError, match=r"SCALING_FP32_SCALES = 0 in the environment .*: unset it"):
        native.check_training()


def transformer_engine_recipes() -> Any:
    """Of its module what specrl touches: scales are read from the environment once, as attributes of the class."""

    @dataclass(frozen=True)
    class QParams:
        power_2_scale: bool
        amax_epsilon: float

    class Float8BlockScaling:
        fp8_quant_fwd_inp = fp8_quant_fwd_weight = fp8_quant_bwd_grad = QParams(True, 0.0)
        resets = False

        def __init__(self, fp8_format: str) -> None:
            if self.resets:
                self.fp8_quant_fwd_inp = QParams(True, 0.0)

    return SimpleNamespace(QParams=QParams, Float8BlockScaling=Float8BlockScaling, Format=SimpleNamespace(E4M3="e4m3"))


def test_devices_without_fp8_in_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    with pytest.raises(ValueError, match=r'^precision\.training = "fp8": .*this one has 8\.9; set precision.training'):
        native.check_training()
    with pytest.raises(ValueError, match=r'^precision\.generation = "fp8": .*set precision\.generation = "bf16"$'):
        EnginePrecision(PrecisionConfig(generation="fp8"), Recipe(LLAMA, 2))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(ValueError, match=r'^precision\.training = "fp8": .*\(Blackwell\) on, .* = "bf16"$'):
        native.check_training()


@pytest.mark.parametrize(
    ("capability", "backend"), [((8, 9), "TRITON_ATTN"), ((9, 0), "FLASH_ATTN"), ((10, 0), "TRITON_ATTN")]
)
def test_attention_on_gpus_reads_the_scales_of_the_kv_cache_where_a_refit_puts_them(
    capability: tuple[int, int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    precision = EnginePrecision(PrecisionConfig(kv_cache="fp8"), Recipe(LLAMA, 2))
    assert precision.arguments()["attention_backend"] == backend
    assert "attention_backend" not in EnginePrecision(PrecisionConfig(), Recipe(LLAMA, 2)).arguments()


def test_an_unknown_layer_and_a_foreign_linear_are_refused(model_dir: Path, ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"of another model: \['layers\.3\.linear_qkv'\]"):
        make_policy(model_dir, ranks, LinearPrecision(["layers.3.linear_qkv"]), trainable=False)
    precision = LinearPrecision()
    make_policy(model_dir, ranks, precision, trainable=False)
    layer = precision.linears["layers.0.linear_fc1"].module

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.family, self.config = LLAMA, layer.config
            self.decoder = torch.nn.Module()
            block = torch.nn.Module()
            block.layer_number = 1  # type: ignore[assignment]
            block.mlp, block.self_attention = torch.nn.Module(), torch.nn.Module()
            block.mlp.linear_fc1 = block.mlp.linear_fc2 = layer
            block.self_attention.linear_qkv = block.self_attention.linear_proj = torch.nn.Linear(4, 4)
            self.decoder.layers = [block]  # type: ignore[assignment]

    with pytest.raises(AssertionError, match=r"cannot be emulated in layers\.0\.linear_qkv, a Linear"):
        LinearPrecision().attach(Model())


def test_every_rank_of_a_divided_sequence_has_a_token_count_that_native_fp8_takes() -> None:
    policy: Any = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(fp8="e4m3", sequence_parallel=True)),
        config=SimpleNamespace(tensor_parallel=4),
    )
    assert Policy.pad_multiple.fget(policy) // 4 % FP8_TOKENS == 0  # type: ignore[attr-defined]
