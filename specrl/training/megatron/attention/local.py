"""Attention over a flat row in plain PyTorch, for CPUs, segment by segment: nothing is computed for padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specrl.training.megatron.attention.layout import RowLayout, Segment, row_layout

Observe = Callable[[Tensor, Tensor, Tensor], None]
"""A function of rotated queries, rotated keys and values, [1, heads, tokens, width] each."""
MAX_SCORES = 2**26
"""The number of attention scores that exist at once in a pass without a gradient; the plan counts them."""


class Rotary:
    """The cosines and sines of the rotary embedding (Su et al., 2021), which rotates halves against each other."""

    def __init__(self, frequencies: Tensor, scale: float = 1.0) -> None:
        self._frequencies, self._scale = frequencies.float(), scale  # [width / 2], and YaRN's factor

    @lru_cache(maxsize=64)  # noqa: B019  (one object per model, held by its layers)
    def __call__(self, seq: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [seq, width / 2] each, in the compute type, as transformers and vLLM have them."""
        angles = torch.outer(torch.arange(seq, dtype=torch.float32), self._frequencies)
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return cos.to(device, dtype), sin.to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [..., tokens, width] by the angles of its tokens, [tokens, width / 2]."""
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def rotated(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys, each [tokens, 1, heads, width], and lay them out for products of whole groups.

    Returns:
        Queries [groups, group's queries, tokens, width], and keys and values [groups, tokens, width].
    """
    tokens, _, heads, width = query.shape
    groups = key.shape[2]
    q = rotate(query.view(tokens, groups, heads // groups, width).permute(1, 2, 0, 3), cos, sin)
    k = rotate(key[:, 0].transpose(0, 1), cos, sin)
    return q, k, value[:, 0].transpose(0, 1).contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Attention [groups, each, tokens, width] of such queries, and keys and values [groups, tokens, width]."""
    if not torch.is_grad_enabled():
        return _attend_without_gradient(q, k, v, segments)
    result: Tensor = _Attention.apply(q, k, v, tuple(segments))  # type: ignore[no-untyped-call]
    return result


@lru_cache(maxsize=32)
def _causal_mask(size: int, device: torch.device) -> Tensor:
    return torch.full((size, size), float("-inf"), device=device).triu_(1)


def _weights(q: Tensor, k: Tensor, each: int) -> Tensor:
    """Softmax(q k^T / sqrt(width)) in the type of `q`, with scores in float32.

    The last query of each of a group's `each` heads sees all keys, the one before all but the last key, and so on.
    """
    groups, rows, keys = q.shape[0], q.shape[1] // each, k.shape[1]
    scores = torch.bmm(q.float() * q.shape[-1] ** -0.5, k.float().mT)
    mask = _causal_mask(1 << (rows - 1).bit_length(), q.device)
    scores.view(groups, each, rows, keys)[..., keys - rows :].add_(mask[:rows, :rows])
    return torch.softmax(scores, -1).to(q.dtype)


def _keys_of(x: Tensor, segment: Segment) -> Tensor:
    own = x[:, segment.start : segment.stop]
    if segment.prefix_start == segment.prefix_stop:
        return own
    return torch.cat((x[:, segment.prefix_start : segment.prefix_stop], own), 1)


def _attend_without_gradient(q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Do what `attend` does with at most `MAX_SCORES` scores at a time, or those of one token."""
    groups, each, _, width = q.shape
    context = torch.empty_like(q)
    for segment in segments:
        keys, values = _keys_of(k, segment), _keys_of(v, segment)
        prefix = segment.num_keys - segment.length
        rows = max(1, MAX_SCORES // (groups * each * segment.num_keys))
        for first in range(0, segment.length, rows):
            end = min(first + rows, segment.length)
            part = slice(segment.start + first, segment.start + end)
            weights = _weights(q[:, :, part].flatten(1, 2), keys[:, : prefix + end], each)
            found = torch.bmm(weights, values[:, : prefix + end])
            context[:, :, part] = found.view(groups, each, end - first, width)
    return context


class _Attention(torch.autograd.Function):
    """Computes grouped-query attention, with scores and softmax in float32, and saves its weights.

    The queries of one group lie below each other as [group's queries x rows], so that a group is one matrix product.
    Gradients of a shared prefix's keys and values are added up in float32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: tuple[Segment, ...]) -> Tensor:
        groups, each, _, width = q.shape
        context = torch.empty_like(q)
        saved = []
        for segment in segments:
            part = slice(segment.start, segment.stop)
            weights = _weights(q[:, :, part].flatten(1, 2), _keys_of(k, segment), each)
            found = torch.bmm(weights, _keys_of(v, segment))
            context[:, :, part] = found.view(groups, each, segment.length, width)
            saved.append(weights)
        ctx.save_for_backward(q, k, v, *saved)
        ctx.segments = segments
        return context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *saved = ctx.saved_tensors
        groups, each, _, width = q.shape
        scale = width**-0.5
        grad_q = torch.empty_like(q)
        grad_k, grad_v = k.new_zeros(k.shape, dtype=torch.float32), v.new_zeros(v.shape, dtype=torch.float32)
        for segment, weights in zip(ctx.segments, saved, strict=True):
            part, prefix = slice(segment.start, segment.stop), slice(segment.prefix_start, segment.prefix_stop)
            own, before = grad[:, :, part].flatten(1, 2), segment.num_keys - segment.length
            grad_values = torch.bmm(weights.mT, own)
            grad_weights = torch.bmm(own, _keys_of(v, segment).mT)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            found = torch.bmm(grad_scores, _keys_of(k, segment)).mul_(scale)
            grad_q[:, :, part] = found.view(groups, each, segment.length, width)
            grad_keys = torch.bmm(grad_scores.mT, q[:, :, part].flatten(1, 2)).mul_(scale)
            for total, gradient in ((grad_k, grad_keys), (grad_v, grad_values)):
                total[:, part] += gradient[:, before:]
                if before:
                    total[:, prefix] += gradient[:, :before]
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None


@lru_cache(maxsize=8)
def _angles(rotary: Rotary, layout: RowLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(layout.longest, dtype, layout.device)
    return cos[layout.positions], sin[layout.positions]


class RotaryAttention(torch.nn.Module):
    """Megatron's `core_attention` over a flat row, which rotates queries and keys too.

    With a gradient, memory grows with the scores of all segments together; without one, at most `MAX_SCORES` scores
    exist at a time.
    """

    def __init__(self, config: Any, rotary: Rotary, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.observe: Observe | None = None
        """A function called in each forward pass, with rotated queries and what the engine's KV cache would hold."""
        self._rotary = rotary

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        """[tokens, 1, heads x width], given [tokens, 1, heads, width] and `MicroBatch.segments` as the mask."""
        layout: RowLayout = row_layout(attention_mask, query.device)
        cos, sin = _angles(self._rotary, layout, query.dtype)
        q, k, v = rotated(query, key, value, cos, sin)
        if self.observe is not None:
            self.observe(q.detach().flatten(0, 1)[None], k.detach()[None], v.detach()[None])
        context = attend(q, k, v, layout.segments)
        return context.permute(2, 0, 1, 3).reshape(query.shape[0], 1, -1)
