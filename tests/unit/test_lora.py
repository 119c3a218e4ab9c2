"""LoRA: what is trained, that all others see the sum, and that PEFT's format and the checkpoints hold it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specrl.config import ConfigError, PolicyConfig, TinyModelConfig, parse_config
from specrl.config.model import ModelConfig
from specrl.distributed import Ranks, join, leave
from specrl.models.layout import layout_problems
from specrl.models.shapes import model_shape
from specrl.models.tiny import write_tiny_model
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.checkpoint.load import TrainState
from specrl.training.checkpoint.manifest import CheckpointError
from specrl.training.checkpoint.policy_folder import write_policy_folder
from specrl.training.lora import DOWN, UP
from specrl.training.megatron import scores, weights
from specrl.training.megatron.export import export
from specrl.training.megatron.policy import Policy

# isort: split
from megatron.core import parallel_state

FAMILIES = ("llama", "qwen2", "qwen3", "ernie4_5_moe")
"""Tied and not, with biases, with norms of heads, and with channels that Megatron has in another order."""
LORA = {"rank": 4, "alpha": 6.0}
SCALE = 1.5


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in FAMILIES:
        found[family] = tmp_path_factory.mktemp(family)
        tiny = TinyModelConfig(family=family, hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1)
        write_tiny_model(ModelConfig(source="tiny", tiny=tiny, max_length=64), 0, found[family])
    return found


def batches() -> list[MicroBatch]:
    sequences = [TokenSequence([4 + (7 * i + n) % 90 for i in range(20 + n)], 5, n) for n in range(4)]
    return pack(sequences, 50)


def loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    weight = torch.tensor([1.0 + index for index in batch.indices])[:, None]
    return -(weight * logprobs * batch.mask).sum() / 100, {}


def opened(folder: Path, ranks: Ranks, *, dtype: str = "float32", trainable: bool = True, **config: Any) -> Policy:
    settings = PolicyConfig(**{"lr": 1e-2, "clip_grad": 1e9, "lora": LORA, **config})
    return Policy(folder, settings, dtype=dtype, ranks=ranks, seed=3, trainable=trainable, keep_reference=trainable)


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.hf_weights()}


def adapters_of(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in export(policy.model, policy._trained)}


def by_hand(base: dict[str, Tensor], adapters: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """W + scale B A: what PEFT's documentation says that a model computes with."""
    found = {}
    for name, weight in base.items():
        module = name.removesuffix("weight")
        delta = adapters[module + UP] @ adapters[module + DOWN] if module + UP in adapters else None
        found[name] = weight if delta is None else weight + scale * delta
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_all_others_see_the_weights_with_their_adapters(
    models: dict[str, Path], ranks: Ranks, family: str, tmp_path: Path
) -> None:
    policy = opened(models[family], ranks)
    base = weights_of(opened(models[family], ranks, lora=None))
    assert all(torch.equal(base[name], tensor) for name, tensor in policy.hf_weights())  # B is 0
    for _ in range(3):
        policy.train_step(batches(), loss)
    adapters, trained = adapters_of(policy), weights_of(policy)
    assert len(adapters) == 2 * 7 * policy.hf_config.num_hidden_layers
    for name, expected in by_hand(base, adapters, SCALE).items():
        torch.testing.assert_close(trained[name], expected, atol=1e-6, rtol=0)
        changed = name.removesuffix("weight") + UP in adapters
        assert torch.equal(trained[name], base[name]) != changed, name
    policy.save_pretrained(tmp_path / "policy")
    whole = opened(tmp_path / "policy", ranks, trainable=False)
    for found, expected in zip(policy.logprobs(batches()), whole.logprobs(batches()), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("family", "recompute"), [*((family, False) for family in FAMILIES), ("llama", True)])
def test_gradients_are_those_of_the_weights_through_the_product(
    models: dict[str, Path], ranks: Ranks, family: str, recompute: bool, tmp_path: Path
) -> None:
    """Mutation: no gradient where a layer is computed again, because the embeddings have none."""
    policy = opened(models[family], ranks, recompute=recompute)
    policy.train_step(batches(), loss)  # B is 0 before
    policy.save_pretrained(tmp_path / "policy")
    whole = opened(tmp_path / "policy", ranks, lora=None)
    for trained in (policy, whole):
        trained.train_step(batches(), loss, lr=0.0)
    adapters = adapters_of(policy)
    named, full = dict(policy.model.named_parameters()), dict(whole.model.named_parameters())
    own = {adapter.hf[0]: named[adapter.name].main_grad for adapter in policy._trained.parameters}
    norm = 0.0
    for weight in policy._weights.parameters:
        for name, gradient in zip(weight.hf, whole._weights.unmerge(weight, full[weight.name].main_grad), strict=True):
            module = name.removesuffix("weight")
            if module + UP not in own:
                continue
            expected = {
                UP: SCALE * gradient @ adapters[module + DOWN].t(),
                DOWN: SCALE * adapters[module + UP].t() @ gradient,
            }
            for end, tensor in expected.items():
                norm += float(tensor.square().sum())
                torch.testing.assert_close(own[module + end], tensor, atol=1e-5, rtol=1e-4)
    assert policy.train_step(batches(), loss, lr=0.0)[0]["grad_norm"] == pytest.approx(norm**0.5, rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_at_full_rank_is_that_of_full_training(
    models: dict[str, Path], ranks: Ranks, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With A the identity, B = 0 and alpha = rank, B gets the gradient of the matrix, and A none."""

    def initial(name: str, shape: tuple[int, ...], _: int) -> Tensor:
        return torch.zeros(shape) if name.endswith(UP) else torch.eye(*shape)

    monkeypatch.setattr(weights, "initial", initial)
    base = weights_of(whole := opened(models[family], ranks, lora=None))
    width = max(base[name].shape[1] for name in base if name.endswith("_proj.weight"))
    policy = opened(models[family], ranks, lora={"rank": width, "alpha": float(width)})
    steps = [trained.train_step(batches(), loss)[0] for trained in (whole, policy)]
    assert steps[0]["loss"] == steps[1]["loss"]
    full, low, adapters = weights_of(whole), weights_of(policy), adapters_of(policy)
    linear = [name for name in base if name.removesuffix("weight") + UP in adapters]
    assert len(linear) == 7 * policy.hf_config.num_hidden_layers
    for name in linear:
        assert (full[name] - base[name]).abs().max() > 0.005, name  # Adam's first steps are of about lr = 0.01
        torch.testing.assert_close(low[name], full[name], atol=1e-6, rtol=0)


def test_only_adapters_have_gradients_and_an_optimizer(
    models: dict[str, Path], ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where logits exist for a few tokens at a time, and a head that is trained gets its gradient in parts."""
    policy = opened(models["llama"], ranks)
    monkeypatch.setattr(scores, "MAX_LOGITS", 3 * policy.vocab_size)
    policy.train_step(batches(), loss)
    for name, parameter in policy.model.named_parameters():
        is_adapter = ".parametrizations.weight.0." in name
        assert parameter.requires_grad == is_adapter == hasattr(parameter, "main_grad")
        assert parameter.grad is None
    stored = sum(piece.size for shard in policy.shards() for piece in shard.pieces)
    assert stored == sum(tensor.numel() for tensor in adapters_of(policy).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_policy_continues_bit_by_bit(
    models: dict[str, Path], ranks: Ranks, dtype: str, tmp_path: Path
) -> None:
    """The checkpoint has the adapters alone, from which the policy is written without a trainer too."""
    straight, interrupted = (opened(models["llama"], ranks, dtype=dtype) for _ in range(2))
    metrics = [straight.train_step(batches(), loss)[0] for _ in range(4)]
    checkpoints = Checkpoints(tmp_path / "checkpoints", interrupted, Retention(1))
    for _ in range(2):
        interrupted.train_step(batches(), loss)
    checkpoints.save(TrainState(2, interrupted, None))
    checkpoints.wait()
    resumed = opened(models["llama"], ranks, dtype=dtype)
    assert Checkpoints(tmp_path / "checkpoints", resumed, Retention(1)).restore(None) is not None
    again = [resumed.train_step(batches(), loss)[0] for _ in range(2)]
    assert again == metrics[2:]
    assert all(torch.equal(tensor, weights_of(resumed)[name]) for name, tensor in straight.hf_weights())
    (folder,) = (tmp_path / "checkpoints").glob("step=*")
    stored = load_file(folder / "policy-00000.safetensors")
    assert all(f".{DOWN}[" in name or f".{UP}[" in name for name in stored)
    interrupted.save_pretrained(tmp_path / "saved")
    write_policy_folder(folder, models["llama"], tmp_path / "written", getattr(torch, dtype), ranks)
    saved, written = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "written"))
    assert saved.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in saved.items())


def test_a_checkpoint_of_other_adapters_is_refused(models: dict[str, Path], ranks: Ranks, tmp_path: Path) -> None:
    policy = opened(models["llama"], ranks)
    checkpoints = Checkpoints(tmp_path, policy, Retention(1))
    checkpoints.save(TrainState(1, policy, None))
    checkpoints.wait()
    for other in (None, {"rank": 4, "alpha": 8.0}):
        with pytest.raises(CheckpointError, match=r"holds a policy of .*, LoRA of rank 4 with alpha 6, this run has"):
            Checkpoints(tmp_path, opened(models["llama"], ranks, lora=other), Retention(1)).restore(None)


@pytest.mark.parametrize("family", ["llama", "ernie4_5_moe"])
def test_the_adapters_are_written_as_peft_reads_them(
    models: dict[str, Path], ranks: Ranks, family: str, tmp_path: Path
) -> None:
    """The names and the formula are those of PEFT's documentation: W + lora_alpha / r * lora_B lora_A."""
    policy = opened(models[family], ranks)
    base = weights_of(policy)
    for _ in range(2):
        policy.train_step(batches(), loss)
    policy.save_adapter(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["bias"]) == ("LORA", "CAUSAL_LM", "none")
    stored, found = load_file(tmp_path / "adapter_model.safetensors"), dict(base)
    for name in base:
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in config["target_modules"]:
            down, up = (stored.pop(f"base_model.model.{module}.lora_{letter}.weight") for letter in "AB")
            assert down.shape[0] == up.shape[1] == config["r"]
            found[name] = base[name] + config["lora_alpha"] / config["r"] * up @ down
    assert not stored
    for name, tensor in policy.hf_weights():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)
        assert torch.equal(tensor, base[name]) != (name.removesuffix("weight") + UP in adapters_of(policy))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_peft_reads_the_adapters_back(models: dict[str, Path], ranks: Ranks, family: str, tmp_path: Path) -> None:
    """Not for ernie4_5_moe: in models of such a type PEFT 0.21.2 looks for MLPs among experts, which this one lacks."""
    policy = opened(models[family], ranks)
    for _ in range(2):
        policy.train_step(batches(), loss)
    policy.save_adapter(tmp_path / "adapter")
    policy.save_pretrained(tmp_path / "policy")
    folders, tokens = (models[family], tmp_path / "policy"), torch.arange(4, 24)[None]
    base, whole = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    read = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, whole(tokens).logits, atol=1e-5, rtol=0)
    found = read.merge_and_unload().state_dict()
    assert found.keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)


def test_the_reference_is_the_policy_without_adapters_and_takes_no_second_copy(
    models: dict[str, Path], ranks: Ranks
) -> None:
    policy = opened(models["llama"], ranks)
    before, base = policy.logprobs(batches()), weights_of(policy)
    policy.train_step(batches(), loss)
    trained = weights_of(policy)
    with policy.reference_weights():
        assert all(torch.equal(tensor, base[name]) for name, tensor in policy.hf_weights())
        assert all(map(torch.equal, policy.logprobs(batches()), before))
    assert all(torch.equal(tensor, trained[name]) for name, tensor in policy.hf_weights())
    kept = sum(tensor.numel() for tensor in policy._reference or ())
    assert kept == sum(tensor.numel() for tensor in adapters_of(policy).values())


def test_what_has_no_adapters_is_refused_in_one_line(ranks: Ranks, tmp_path: Path) -> None:
    experts = {"source": "tiny", "max_length": 64, "tiny": {"family": "qwen3_moe"}}
    base = {"name": "lora", "policy": {"lora": {}}, "sampling": {"max_response_tokens": 32}}
    with pytest.raises(ConfigError, match=r'policy.lora with precision.training = "fp8"'):
        parse_config({**base, "precision": {"training": "fp8"}})
    config = parse_config({**base, "model": experts})
    (line,) = (text for text in layout_problems(config, model_shape(config.model)) if "lora" in text)
    assert line == "policy.lora: tiny has experts, which have no adapters here; leave policy.lora out"
    write_tiny_model(config.model, 0, tmp_path)
    with pytest.raises(ValueError, match=r"policy.lora: the model has experts"):
        opened(tmp_path, ranks)
