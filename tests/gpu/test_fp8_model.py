"""Tests of a policy and an engine in native FP8 against their emulation, on one layer of an 8B model's shape.

Run on a machine with a GPU: `python -m pytest tests/gpu -q`. What its packages lack is skipped by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from specrl.config import Config, PolicyConfig
from specrl.distributed import Ranks, join
from specrl.models.families import FAMILIES, TINY_VOCAB_SIZE
from specrl.models.sources import materialise_model
from specrl.models.tiny import character_tokenizer
from specrl.precision import native
from specrl.precision.blocks import ALONG_ROWS, SQUARE, fake_quantise
from specrl.precision.recipe import Recipe, engine_name
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: FP8 was only tested as emulated"),
]
HIDDEN, INTERMEDIATE, MAX_LENGTH = 4096, 12288, 256
PRODUCT_ERROR = 0.005
"""The allowed error as a part of the norm, from FP32 sums in another order and the output's rounding to BF16."""
EXPERT_ERROR = 0.03
"""The allowed error of an expert: where its inner activations differ by a rounding to BF16, some round to another FP8
value. FP8 itself costs more."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.cuda.get_device_capability() < native.FIRST_CAPABILITY:
        pytest.skip("this GPU has no FP8 in blocks")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    directory = tmp_path_factory.mktemp("fp8") / "policy"
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    character_tokenizer(MAX_LENGTH).save_pretrained(directory)
    return directory


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()  # the process group stays: the engine is in it


def sequences() -> list[TokenSequence]:
    """Return 5 x 77 tokens, a number that is no multiple of 16."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(3, TINY_VOCAB_SIZE, (5, 77), generator=generator).tolist()
    return [TokenSequence(row, 7, index) for index, row in enumerate(rows)]


def mean_loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs[batch.mask].sum() / 350, {}


def logprobs_of(policy: Policy) -> Tensor:
    """Return the log-probs of all response tokens, in order."""
    found = {}
    batches = pack(sequences(), 1024, policy.pad_multiple)
    for batch, logprobs in zip(batches, policy.logprobs(batches), strict=True):
        found |= {index: logprobs[row][batch.mask[row]].cpu() for row, index in enumerate(batch.indices)}
    return torch.cat([found[index] for index in sorted(found)])


def test_a_native_policy_trains_on_any_number_of_tokens(model_dir: Path, ranks: Ranks) -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    native.check_training()

    def policy(fp8: LinearPrecision | None, *, trainable: bool = False) -> Policy:
        config = PolicyConfig(lr=1e-4)
        return Policy(model_dir, config, dtype="bfloat16", ranks=ranks, seed=0, fp8=fp8, trainable=trainable)

    emulation = LinearPrecision()
    emulation.is_native = False
    emulated, plain = logprobs_of(policy(emulation)), logprobs_of(policy(None))
    precision = LinearPrecision()
    trained = policy(precision, trainable=True)
    assert (precision.mode, trained.pad_multiple) == ("native", 16)
    found = logprobs_of(trained)
    assert (found - emulated).abs().mean() < (plain - emulated).abs().mean()
    metrics, _ = trained.train_step(pack(sequences(), 1024, trained.pad_multiple), mean_loss)
    precision.assert_quantised(trained=True)
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    trained.train_step([], mean_loss)  # a rank without work takes part all the same
    assert not torch.equal(logprobs_of(trained), found)


@pytest.mark.parametrize("num_tokens", [8, 64])
def test_the_engines_product_is_the_emulations(model_dir: Path, num_tokens: int) -> None:
    """The products agree with few tokens and with many, for which kernels may differ."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from specrl.rollout.engine import Engine

    config = Config.model_validate(
        {
            "name": "fp8",
            "model": {"source": str(model_dir), "max_length": MAX_LENGTH - 16},
            "sampling": {"max_response_tokens": 32},
            "speculation": {"method": "none", "k": 0},
            "engine": {"max_num_seqs": 8, "gpu_memory_fraction": 0.3},
            "precision": {"generation": "fp8"},
        }
    )
    engine = Engine(model_dir, None, config=config, seed=0, recipe=Recipe(FAMILIES["qwen3"], 1))
    assert engine.mode == "native"
    engine.assert_quantised()
    weights = load_file(model_dir / "model.safetensors", device="cuda")
    parts = {"linear_fc1": ("mlp.gate_proj", "mlp.up_proj"), "linear_fc2": ("mlp.down_proj",)}
    for linear, names in parts.items():
        weight = torch.cat([weights[f"model.layers.0.{name}.weight"] for name in names])
        generator = torch.Generator("cuda").manual_seed(num_tokens)
        x = torch.randn(num_tokens, weight.shape[1], device="cuda", generator=generator)
        x[:, ::97] *= 50
        x = x.bfloat16()
        layer = engine.policy.get_submodule(engine_name(FAMILIES["qwen3"], f"layers.0.{linear}"))
        with torch.inference_mode():
            found = layer.quant_method.apply(layer, x, None).float()
        expected = fake_quantise(x, ALONG_ROWS).float() @ fake_quantise(weight, SQUARE).float().t()
        assert float((found - expected).norm() / expected.norm()) < PRODUCT_ERROR
    engine.shutdown()


def test_the_engines_experts_are_the_emulations_and_its_router_is_not_in_fp8(tmp_path: Path) -> None:
    """One expert at a time: both products and the rounding of the inner activations between them."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from specrl.rollout.engine import Engine
    from specrl.rollout.vllm.weights.experts import expected_output, outputs_of_experts

    if torch.cuda.get_device_capability() < native.FIRST_CAPABILITY:
        pytest.skip("this GPU has no FP8 in blocks")
    sizes = {"hidden_size": 1024, "num_layers": 6, "num_heads": 8, "num_experts": 8, "num_experts_per_tok": 2}
    tiny = {"family": "qwen3_moe", "moe_intermediate_size": 768, **sizes}
    config = Config.model_validate(
        {
            "name": "fp8",
            "model": {"source": "tiny", "dtype": "bfloat16", "max_length": MAX_LENGTH - 16, "tiny": tiny},
            "sampling": {"max_response_tokens": 32},
            "speculation": {"method": "none", "k": 0},
            "engine": {"max_num_seqs": 8, "gpu_memory_fraction": 0.3},
            "precision": {"generation": "fp8"},
        }
    )
    directory = materialise_model(config.model, 0, tmp_path / "policy")
    engine = Engine(directory, None, config=config, seed=0, recipe=Recipe(FAMILIES["qwen3_moe"], 6))
    assert engine.mode == "native"
    engine.assert_quantised()
    weights = load_file(directory / "model.safetensors", device="cuda")
    layer = engine.policy.get_submodule("model.layers.0.mlp.experts.routed_experts")
    x = torch.randn(40, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    outputs = outputs_of_experts(layer, x.cuda()).float().cpu()
    for expert in (0, 5):
        names = (f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))
        matrices = [weights[name] for name in names]
        plain, expected = expected_output(layer, matrices, x.cuda()).cpu(), expert_in_fp8(matrices, x)
        found = outputs[expert]
        assert float((found - expected).norm() / expected.norm()) < EXPERT_ERROR
        assert float((plain - expected).norm() / expected.norm()) > EXPERT_ERROR
    engine.shutdown()


def expert_in_fp8(matrices: list[Tensor], x: Tensor) -> Tensor:
    """Return what the emulation makes of inputs [tokens, in] with an expert's gate, up and down projection."""
    gate, up, down = (fake_quantise(matrix.cpu(), SQUARE).float() for matrix in matrices)
    inputs = fake_quantise(x, ALONG_ROWS).float()
    inner = (torch.nn.functional.silu(inputs @ gate.t()) * (inputs @ up.t())).bfloat16()
    return fake_quantise(inner, ALONG_ROWS).float() @ down.t()
