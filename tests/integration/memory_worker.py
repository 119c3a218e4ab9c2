"""What a policy of 8B takes on one rank of eight: `python -m tests.integration.memory_worker CONFIG FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3Config

from specrl.config import load_config
from specrl.distributed import Ranks
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.megatron import attention, model, policy, scores
from specrl.training.megatron.policy import Policy
from tests import fake_memory

# isort: split
import megatron.core.fusions.fused_bias_swiglu as swiglu
import megatron.core.optimizer.clip_grads as clipping
import megatron.core.transformer.attention as megatron_attention

RANKS = 8
SHARING = 8  # responses to a prompt in one micro-batch, of two tokens each
LAYOUTS: list[attention.RowLayout] = []
REAL_ROW_LAYOUT = attention.row_layout
QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
    architectures=["Qwen3ForCausalLM"],
)


class Norm(model.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return fake_memory.norm(x, self.weight)


def row_layout(segments: Tensor, device: torch.device) -> attention.RowLayout:
    """The layout of the pass's row: where a layer is computed again, its segments have become fake."""
    if not isinstance(segments, FakeTensor):
        LAYOUTS[:] = [REAL_ROW_LAYOUT(segments, device)]
    return LAYOUTS[0]


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy, "AutoConfig", SimpleNamespace(from_pretrained=lambda _: QWEN3_8B))
    patch.setattr(policy.weights, "load", lambda *_: None)
    for name in ("to", "bfloat16"):  # nothing is moved: a fake parameter cannot be
        patch.setattr(model.PolicyModel, name, lambda self, *_: self, raising=False)
    patch.setattr(dist, "all_gather_object", lambda found, own, group=None: found.__setitem__(slice(None), [own] * 8))
    patch.setitem(scores.CHUNK_ELEMENTS, "cpu", scores.CHUNK_ELEMENTS["cuda"])
    patch.setattr(model, "RMSNorm", Norm)
    patch.setattr(megatron_attention, "apply_rotary_pos_emb", lambda x, *_, **__: fake_memory.rotate(x))
    patch.setattr(attention, "row_layout", row_layout)
    patch.setattr(attention, "_transformer_engine", lambda *_: lambda q, k, v, layout: fake_memory.attention(q, k, v))
    # Compiled on a GPU, its steps are one.
    patch.setattr(swiglu, "swiglu_back", lambda grad, y: torch.empty_like(y))
    # The norm of the gradients, whose fallback for CPUs puts numbers together, is not the memory of this module.
    patch.setattr(clipping, "multi_tensor_applier", norm_or_scale)


def norm_or_scale(operation: Any, *_: Any) -> tuple[Tensor, None] | None:
    return (torch.zeros(1), None) if operation is clipping.l2_norm_impl else None


def loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs.sum(), {}


def measure(config_path: Path) -> dict[str, int]:
    config = load_config(config_path)
    length, multiple = config.model.max_length, 16 * config.policy.tensor_parallel
    # A micro-batch that is all response, so that the output layer takes most, and one that is all prompt.
    response, prompt = (pack([TokenSequence([4] * length, n, 0)], length, multiple) for n in (1, length - 64))
    groups = -(-length // config.max_prompt_tokens)
    prompt_length = length // groups - 2 * SHARING
    shared = pack(
        (
            TokenSequence.of([group] * prompt_length, [4, 4], SHARING * group + index)
            for group in range(groups)
            for index in range(SHARING)
        ),
        length,
        multiple,
    )
    assert len(shared) == 1
    found: dict[str, int] = {}
    with fake_memory.counted() as live:
        ranks = Ranks(0, RANKS, 0, torch.device("cpu"))
        own = Policy(Path(), config.policy, dtype="bfloat16", ranks=ranks, seed=0)

        def run(batches: list[MicroBatch], *, learn: bool) -> Any:
            return own._run(batches, 1.0, None, loss if learn else None)

        live.peak_of(lambda: run(prompt, learn=False))  # makes the buffer in which Megatron gathers
        found["forward, response"] = live.peak_of(lambda: run(response, learn=False))
        own.optimizer.zero_grad()
        found["update, response"] = live.peak_of(lambda: run(response, learn=True))
        found["update, prompt"] = live.peak_of(lambda: run(prompt, learn=True))
        found["update, shared prompts"] = live.peak_of(lambda: run(shared, learn=True))
        before = live.now
        found["optimizer's step"] = live.peak_of(lambda: own.optimizer.step(1e-6)) - (live.now - before)
        found["resident"] = live.now
    return found


if __name__ == "__main__":
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch)
        Path(sys.argv[2]).write_text(json.dumps(measure(Path(sys.argv[1]))))
