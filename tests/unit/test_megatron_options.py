"""What a GPU's trainer is told to do at once: the switches that Megatron and Transformer Engine have for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
import torch
from megatron.core import parallel_state
from transformers import LlamaConfig, Qwen3MoeConfig

from specrl.distributed import Ranks, join, leave
from specrl.training.megatron import model, optimizer, parallel
from specrl.training.megatron.model import transformer_config

SHAPE = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
DENSE = LlamaConfig(**SHAPE, num_key_value_heads=4, intermediate_size=16)
EXPERTS = Qwen3MoeConfig(**SHAPE, num_key_value_heads=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = join()
    parallel.set_up(1, 1, 1, 0)
    yield found
    parallel_state.destroy_model_parallel()
    leave()


@pytest.mark.parametrize("hf", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tensor", [1, 4])
def test_tensor_parallel_ranks_divide_the_sequence(
    hf: object, tensor: int, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: sequence parallelism for models with experts alone."""
    monkeypatch.setattr(model.parallel_state, "get_tensor_model_parallel_world_size", lambda: tensor)
    config = transformer_config(hf, torch.bfloat16, cuda=False, recompute=False)
    assert config.sequence_parallel == (tensor > 1)


class Fused(torch.nn.Linear):
    """A layer with the switch of Transformer Engine's."""

    fuse_wgrad_accumulation = False


@pytest.mark.parametrize("data", [1, 2])
def test_gradients_are_reduced_beside_the_backward_pass_and_added_up_in_the_product(
    data: int, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer.parallel_state, "get_data_parallel_world_size", lambda: data)
    config = transformer_config(DENSE, torch.float32, cuda=False, recompute=False)
    layers = torch.nn.Sequential(Fused(4, 4), torch.nn.Linear(4, 4))
    wrapped = optimizer.wrap(layers, config)
    assert wrapped.ddp_config.overlap_grad_reduce == (data > 1)
    assert config.no_sync_func == wrapped.no_sync
    assert layers[0].fuse_wgrad_accumulation and not hasattr(layers[1], "fuse_wgrad_accumulation")
    assert all(hasattr(parameter, "main_grad") for parameter in layers.parameters())
