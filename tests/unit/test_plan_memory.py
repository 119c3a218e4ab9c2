"""What the plan computes is what the trainer does: bytes saved for the backward pass, and parameter counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
import torch
from megatron.core import parallel_state
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from specrl.config import Config, DrafterConfig, parse_config
from specrl.config.training import LoraConfig
from specrl.distributed import Ranks, join, leave
from specrl.models.families import FAMILIES, LLAMA
from specrl.models.shapes import ModelShape, model_shape
from specrl.models.tiny import write_tiny_model
from specrl.projection import memory
from specrl.projection.memory import GIB, Rank, activations
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.calibration import KL_POSITIONS
from specrl.training.drafter import attention, chains
from specrl.training.drafter.kinds.mtp import Mtp, mtp_shape
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features
from specrl.training.megatron.policy import Policy
from tests.peak_memory import peak_bytes

SEQUENCES, LENGTH = 4, 256
ALONE = Ranks(0, 1, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


def configured(family: Literal["llama", "qwen3"]) -> Config:
    tiny = {"family": family, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2}
    return parse_config(
        {
            "name": "run",
            "model": {"source": "tiny", "max_length": LENGTH, "tiny": tiny},
            "sampling": {"max_response_tokens": 64},
            "policy": {"tokens_per_micro_batch": SEQUENCES * LENGTH},
            "drafter": {"draft_vocab_size": 64},
        }
    )


def bytes_saved(policy: Policy) -> int:
    """Bytes of distinct storage, parameters aside, that autograd holds when the loss of a micro-batch is computed."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    saved: dict[int, Tensor] = {}  # holds the tensors, so that no address is used twice
    total = 0

    def pack_hook(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    def loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal total
        total = sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in parameters)
        return -logprobs.sum() / batch.mask.sum(), {}

    # All but the last token of each are read: the plan counts the last layer's MLP of prompts too.
    batches = pack(
        [TokenSequence([4 + (i + n) % 90 for i in range(LENGTH)], 1, n) for n in range(SEQUENCES)], SEQUENCES * LENGTH
    )
    assert len(batches) == 1
    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        policy.train_step(batches, loss)
    return total


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_planned_activations_are_what_autograd_saves(
    family: Literal["llama", "qwen3"], tmp_path: Path, ranks: Ranks
) -> None:
    config = configured(family)
    write_tiny_model(config.model, 0, tmp_path)
    shape = model_shape(config.model)
    policy = Policy(tmp_path, config.policy, dtype="bfloat16", ranks=ranks, seed=0)
    planned = activations(Rank(shape, config, gpu=0, data_parallel=1), trainable=True).gib * GIB
    # The final norm and the output layer, which the plan leaves out, are a few percent of six layers.
    assert 0.9 * bytes_saved(policy) <= planned <= 1.05 * bytes_saved(policy)
    assert sum(parameter.numel() for parameter in policy.model.parameters()) == shape.parameters


@pytest.mark.parametrize("settings", [{}, {"num_layers": 3, "feature_layers": [1, 4]}])
def test_planned_drafter_parameters_are_the_drafters(settings: dict[str, Any], tmp_path: Path, ranks: Ranks) -> None:
    config = configured("llama")
    chosen = DrafterConfig.model_validate({**config.drafter.model_dump(), **settings})
    config = config.model_copy(update={"drafter": chosen})
    write_tiny_model(config.model, 0, tmp_path)
    drafter = Drafter.create(tmp_path, config.drafter, torch.arange(64), ranks)
    matrices = sum(p.numel() for p in drafter.model.parameters() if p.dim() == 2)
    assert Rank(model_shape(config.model), config, gpu=0, data_parallel=1).drafter_parameters == matrices


def drafter_of(shape: ModelShape, config: Config, directory: Path) -> Drafter:
    """A drafter for a policy of this shape; nothing of it is trained."""
    policy = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    LlamaForCausalLM(policy).to(getattr(torch, config.model.dtype)).save_pretrained(directory)
    if config.speculation.method == "eagle3":
        tokens = torch.arange(config.drafter.draft_vocab_size)
        return Drafter.create(directory, config.drafter, tokens, ALONE)
    layer = Mtp(mtp_shape(AutoConfig.from_pretrained(directory)), FAMILIES["mimo"])
    return Drafter(layer, torch.arange(shape.vocab_size), directory, config.drafter, ALONE, seed=0)


def random_features(drafter: Drafter, length: int) -> Features:
    """Of one sequence, a response but for the first token."""
    tokens = torch.randint(drafter.shape.vocab_size, (1, length))
    mask = torch.ones(1, length, dtype=torch.bool)
    mask[:, -1] = False
    width = len(drafter.feature_layers) * drafter.shape.hidden_size
    hidden = torch.randn(1, length, width, dtype=drafter.shape.dtype)
    return Features(tokens, mask, hidden, tokens, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("method", "hidden", "draft_vocab_size", "length", "steps", "parts", "scores"),
    [
        ("eagle3", 256, 512, 256, 3, 1, 2**26),
        ("eagle3", 64, 4096, 256, 5, 1, 2**26),
        ("eagle3", 64, 4096, 1024, 7, 8, 2**26),
        ("eagle3", 256, 256, 2048, 3, 16, 2**26),
        ("eagle3", 64, 64, 512, 3, 1, 2**26),
        ("eagle3", 64, 64, 2048, 2, 2, 2**20),
        ("eagle3, 3 layers", 256, 512, 512, 3, 2, 2**26),
        ("mtp", 256, 1, 256, 3, 1, 2**26),
        ("mtp", 64, 1, 1024, 5, 8, 2**26),
    ],
    ids=[
        "layer",
        "logits",
        "logits in parts",
        "slots",
        "scores",
        "scores in chunks",
        "three layers",
        "policy's layer",
        "policy's layer in parts",
    ],
)
def test_planned_drafter_activations_are_what_training_allocates(
    method: str,
    hidden: int,
    draft_vocab_size: int,
    length: int,
    steps: int,
    parts: int,
    scores: int,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chains, "MAX_CHAINS", length // parts)
    monkeypatch.setattr(memory, "DRAFTER_CHAINS", length // parts)
    monkeypatch.setattr(attention, "MAX_SCORES", scores)
    monkeypatch.setattr(memory, "DRAFTER_SCORES", scores)
    shape = ModelShape(LLAMA, 4, hidden, 2 * hidden, 4, 2, hidden // 4, 5000, False, length)
    config = parse_config(
        {
            "name": "run",
            "model": {"dtype": dtype, "max_length": length},
            "sampling": {"max_response_tokens": 64},
            "speculation": {"method": method.partition(",")[0]},
            "drafter": {
                "draft_vocab_size": draft_vocab_size,
                "ttt_steps": steps,
                "num_layers": 3 if "layers" in method else 1,
            },
        }
    )
    drafter = drafter_of(shape, config, tmp_path)
    features = random_features(drafter, length)
    drafter.step_alone(features, 1e-4)  # makes Adam's moments
    planned = memory.drafter_activations(Rank(shape, config, gpu=0, data_parallel=1), length).gib * GIB
    peak = peak_bytes(lambda: drafter.step_alone(features, 1e-4))
    assert 0.6 * planned <= peak <= planned, (peak, planned, peak / planned)


def test_the_plan_and_the_drafters_training_have_the_same_bounds() -> None:
    assert memory.DRAFTER_CHAINS == chains.MAX_CHAINS
    assert memory.DRAFTER_SCORES == attention.MAX_SCORES


def test_the_plan_and_the_calibration_have_the_same_bounds() -> None:
    assert memory.CALIBRATION_POSITIONS == KL_POSITIONS


def test_the_calibration_is_planned_for_sequences_of_its_length() -> None:
    shape = ModelShape(LLAMA, 36, 4096, 12288, 32, 8, 128, 151936, False, 40960)
    data = {"name": "run", "model": {"max_length": 32768}, "sampling": {"max_response_tokens": 30720}}
    peaks = []
    for length in (4096, 8192, 65536):
        config = parse_config(data | {"precision": {"calibration_length": length}, "policy": {"tensor_parallel": 1}})
        items = {item.name: item.gib for item in memory.calibration_items(Rank(shape, config, 1, 1))}
        peaks.append(items["activations"])
        assert 1 < items["reference log-probs"] < 1.2
    assert peaks[1] == pytest.approx(2 * peaks[0])
    assert peaks[2] == pytest.approx(4 * peaks[1])  # no response is longer than model.max_length


@pytest.mark.parametrize("recompute", [False, True])
def test_planned_adapters_and_merged_weights_are_what_the_trainer_holds(
    recompute: bool, tmp_path: Path, ranks: Ranks
) -> None:
    """Beside the activations autograd saves the sums that layers computed with, but where it computes them again.

    Of norms that are not trained it saves less than the plan says.
    """
    config = configured("llama")
    policy_config = config.policy.model_copy(update={"lora": LoraConfig(rank=16), "recompute": recompute})
    config = config.model_copy(update={"policy": policy_config})
    write_tiny_model(config.model, 0, tmp_path)
    rank = Rank(model_shape(config.model), config, gpu=0, data_parallel=1)
    policy = Policy(tmp_path, config.policy, dtype="bfloat16", ranks=ranks, seed=0)
    planned = {item.name: item.gib * GIB for item in memory.policy_items(rank, trainable=True)}
    trained = sum(parameter.numel() for parameter in policy.model.parameters() if parameter.requires_grad)
    assert trained == rank.adapter_parameters == memory.stored_parameters(config, rank.shape)
    assert (planned["gradients"], planned["adapters"]) == (4 * trained, 2 * trained)
    assert planned["masters and Adam moments"] == 12 * trained
    saved, sums = bytes_saved(policy), 2 * rank.layers * rank.shape.linear_parameters_per_layer
    if recompute:
        assert saved < sums and planned["merged weights"] < sums / 2
    else:
        assert sums + 0.75 * planned["activations"] <= saved <= planned["merged weights"] + planned["activations"]
