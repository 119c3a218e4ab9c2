"""Attention over a flat row of segments: Transformer Engine's variable-length kernels, or PyTorch's own.

Megatron passes `MicroBatch.segments` to every layer in place of an attention mask, also when activations are recomputed
in the backward pass, where another micro-batch may have passed in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine as extension
from torch import Tensor

KERNEL_CAPABILITY = (9, 0)
"""The first generation of GPUs (Hopper) on which cuDNN's kernels accept variable lengths."""


class Segment(NamedTuple):
    """Tokens that attend to each other causally, and to all tokens of a prefix; see `MicroBatch.segments`."""

    start: int
    stop: int
    prefix_start: int
    prefix_stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def num_keys(self) -> int:
        return self.length + self.prefix_stop - self.prefix_start


@dataclass(frozen=True)
class RowLayout:
    segments: tuple[Segment, ...]
    device: torch.device

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token in its sequence, [tokens] int64: a segment continues its prefix."""
        parts = [torch.arange(each.num_keys - each.length, each.num_keys) for each in self.segments]
        return torch.cat(parts).to(self.device)

    @property
    def longest(self) -> int:
        return max(each.num_keys for each in self.segments)

    @cached_property
    def keys(self) -> Tensor | None:
        """The place of every key, segment by segment, [keys] int64; None if the keys are the row itself."""
        if all(each.num_keys == each.length for each in self.segments):
            return None
        ranges = [
            torch.arange(*part)
            for each in self.segments
            for part in ((each.prefix_start, each.prefix_stop), (each.start, each.stop))
        ]
        return torch.cat(ranges).to(self.device)

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The cumulative numbers of queries and of keys, [segments + 1] int32 each, as variable-length kernels want."""
        queries = accumulate((each.length for each in self.segments), initial=0)
        keys = accumulate((each.num_keys for each in self.segments), initial=0)
        first, second = (torch.tensor(list(each), dtype=torch.int32) for each in (queries, keys))
        return first.to(self.device), second.to(self.device)

    @property
    def most_queries(self) -> int:
        return max(each.length for each in self.segments)


def row_layout(segments: Tensor, device: torch.device) -> RowLayout:
    """The layout of a row, cached by segments so that its tensors are created once."""
    return _row_layout(tuple(Segment(*row) for row in segments.tolist()), device)


@lru_cache(maxsize=32)
def _row_layout(segments: tuple[Segment, ...], device: torch.device) -> RowLayout:
    return RowLayout(segments, device)


def attend(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, scale: float | None = None) -> Tensor:
    """PyTorch's attention, [tokens, 1, heads x width], given [heads, tokens, width] and [groups, tokens, width]."""
    lengths = [segment.length for segment in layout.segments]
    parts = []
    for segment, *split in zip(layout.segments, *(torch.split(x[None], lengths, 2) for x in (q, k, v)), strict=True):
        own = split
        if segment.num_keys > segment.length:  # the prefix's queries are included, as the causal mask is the fastest
            before = slice(segment.prefix_start, segment.prefix_stop)
            own = [torch.cat((x[None, :, before], y), 2) for x, y in zip((q, k, v), split, strict=True)]
        found = F.scaled_dot_product_attention(own[0], own[1], own[2], is_causal=True, scale=scale, enable_gqa=True)
        parts.append(found[:, :, segment.num_keys - segment.length :])
    return torch.cat(parts, 2).permute(2, 0, 1, 3).flatten(2)


Kernel = Callable[[Tensor, Tensor, Tensor, RowLayout], Tensor]
"""A function of queries [tokens, heads, width] and, gathered as in `RowLayout.keys`, keys and values
[keys, groups, width] that returns [tokens, heads x width]."""


class PackedAttention(torch.nn.Module):
    """Megatron's `core_attention` over a flat row, whose queries and keys are already rotated.

    A shared prompt's keys and values are gathered for each of its responses, so that every segment is one item of the
    kernel's batch, with the causal mask aligned at the bottom right. CPUs, float32 and GPUs before Hopper have no such
    kernel and use PyTorch's attention.
    """

    def __init__(
        self, config: Any, layer_number: int, kernel: Kernel | None = None, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self._kernel, self._scale = kernel or _transformer_engine(config, layer_number, softmax_scale), softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        """[tokens, 1, heads x width], given [tokens, 1, heads, width] and `MicroBatch.segments` as the mask."""
        layout = row_layout(attention_mask, query.device)
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        if self._kernel is None:
            return attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), layout, self._scale)
        if layout.keys is not None:
            k, v = k[layout.keys], v[layout.keys]  # the backward pass adds up in a fixed order
        return self._kernel(q, k, v, layout).reshape(len(q), 1, -1)


def _transformer_engine(config: Any, layer_number: int, softmax_scale: float | None) -> Kernel | None:
    if not torch.cuda.is_available() or config.params_dtype == torch.float32:
        return None
    if torch.cuda.get_device_capability() < KERNEL_CAPABILITY:
        return None
    module = extension.te.pytorch.DotProductAttention(
        num_attention_heads=config.num_attention_heads,
        kv_channels=config.kv_channels,
        num_gqa_groups=config.num_query_groups,
        softmax_scale=softmax_scale,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",
        tp_size=config.tensor_model_parallel_size,
        layer_number=layer_number,
        attention_type="cross",
    )

    def kernel(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> Tensor:
        queries, keys = layout.ends
        result: Tensor = module(
            q,
            k,
            v,
            qkv_format="thd",
            cu_seqlens_q=queries,
            cu_seqlens_kv=keys,
            max_seqlen_q=layout.most_queries,
            max_seqlen_kv=layout.longest,
            attn_mask_type="padding_causal_bottom_right",
        )
        return result

    return kernel
