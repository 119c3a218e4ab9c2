"""Attention over a flat row by PyTorch's own kernels, segment by segment, where Transformer Engine has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from specrl.training.megatron.attention.layout import RowLayout, Segment, row_layout

Observe = Callable[[Tensor, Tensor, Tensor], None]
"""A function of rotated queries, rotated keys and values, [1, heads, tokens, width] each."""


class Rotary:
    """The cosines and sines of the rotary embedding (Su et al., 2021), which rotates halves against each other."""

    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies.float()  # [width / 2]

    @lru_cache(maxsize=64)  # noqa: B019  (one object per model, held by its layers)
    def __call__(self, seq: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """[seq, width / 2] each, in the compute type, as transformers and vLLM have them."""
        angles = torch.outer(torch.arange(seq, dtype=torch.float32), self._frequencies)
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [..., tokens, width] by the angles of its tokens, [tokens, width / 2]."""
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment]) -> Tensor:
    """[tokens, 1, heads x width], given queries [heads, tokens, width], keys and values [groups, tokens, width]."""
    # Repeated, because kernels for float32 on GPUs take no groups.
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    lengths = [segment.length for segment in segments]
    parts = []
    for segment, query, key, value in zip(segments, *(x[None].split(lengths, 2) for x in (q, k, v)), strict=True):
        before = slice(segment.prefix_start, segment.prefix_stop)
        if segment.num_keys == segment.length:
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            key, value = torch.cat((k[None, :, before], key), 2), torch.cat((v[None, :, before], value), 2)
            mask: Any = causal_lower_right(segment.length, segment.num_keys)
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        parts.append(found)
    return torch.cat(parts, 2).permute(2, 0, 1, 3).flatten(2)


@lru_cache(maxsize=8)
def _angles(rotary: Rotary, layout: RowLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(layout.longest, dtype, layout.device)
    return cos[layout.positions], sin[layout.positions]


class RotaryAttention(torch.nn.Module):
    """Megatron's `core_attention` over a flat row, which rotates queries and keys too."""

    def __init__(self, config: Any, rotary: Rotary, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.observe: Observe | None = None
        """A function called in each forward pass, with rotated queries and what the engine's KV cache would hold."""
        self._rotary = rotary

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        """[tokens, 1, heads x width], given [tokens, 1, heads, width] and `MicroBatch.segments` as the mask."""
        layout: RowLayout = row_layout(attention_mask, query.device)
        q, k, v = (x[:, 0].transpose(0, 1) for x in (query, key, value))
        q, k = (rotate(x, *_angles(self._rotary, layout, x.dtype)) for x in (q, k))
        if self.observe is not None:
            self.observe(q.detach()[None], k.detach()[None], v.detach()[None])
        return attend(q, k, v, layout.segments)
