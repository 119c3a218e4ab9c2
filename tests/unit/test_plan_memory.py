"""What the plan computes is what the trainer does: bytes saved for the backward pass, and parameter counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

import specrl.training.megatron_cpu  # noqa: F401  (must precede megatron)

# isort: split
import torch
from megatron.core import parallel_state
from torch import Tensor

from specrl.config import Config, parse_config
from specrl.data.tiny import VOCAB_SIZE, write_tiny_model
from specrl.distributed import Ranks, join, leave
from specrl.projection.memory import GIB, Rank, activations
from specrl.projection.shapes import TINY_VOCAB_SIZE, model_shape
from specrl.training.batches import MicroBatch, Sequence, pack
from specrl.training.drafter import Drafter
from specrl.training.policy import Policy

SEQUENCES, LENGTH = 4, 256


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

    batches = pack([Sequence([4 + i % 90 for i in range(LENGTH)], 8, n) for n in range(SEQUENCES)], SEQUENCES * LENGTH)
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


def test_planned_drafter_parameters_are_the_drafters(tmp_path: Path, ranks: Ranks) -> None:
    config = configured("llama")
    write_tiny_model(config.model, 0, tmp_path)
    drafter = Drafter.create(tmp_path, config.drafter, torch.arange(64), ranks)
    matrices = sum(p.numel() for p in drafter.model.parameters() if p.dim() == 2)
    assert Rank(model_shape(config.model), config, gpu=0, data_parallel=1).drafter_parameters == matrices


def test_the_tiny_vocabulary_is_the_tokenizers() -> None:
    assert VOCAB_SIZE == TINY_VOCAB_SIZE
