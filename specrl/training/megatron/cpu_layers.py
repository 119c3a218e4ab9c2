"""The parts of a transformer layer between its matrix products, for CPUs, in few passes over memory and in float32.

Megatron's local layers leave these to autograd, operation by operation, which on a CPU costs as much as the matrix
products. Each function here saves what its backward pass needs and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Observe = Callable[[Tensor, Tensor, Tensor], None]
"""A function of rotated queries, rotated keys and values, [batch, heads, seq, width] each."""
MAX_SCORES = 2**26
"""The number of attention scores that exist at once in a pass without a gradient; the plan counts them."""


class _RMSNorm(torch.autograd.Function):
    """Computes y = w x / sqrt(mean(x^2) + eps) along the last dimension (Zhang and Sennrich, 2019)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = x.float() if x.dtype != torch.float32 else x.clone()
        norm = torch.linalg.vector_norm(normed, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return normed.mul_(scale).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        grad32 = grad.reshape(-1, width).float()
        normed = (x.float() * scale).view(-1, width)
        product = grad32 * normed
        grad_weight = product.sum(0).to(weight.dtype)
        inner = product.mv(weight.float()).div_(width)[:, None]
        grad_x = torch.addcmul(grad32 * weight.float(), normed, inner, value=-1.0).mul_(scale.view(-1, 1))
        return grad_x.to(x.dtype).view_as(x), grad_weight, None


class RMSNorm(torch.nn.Module):
    """Megatron's norm: [..., hidden] to the same shape and type, computed in float32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # sums its gradients
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return result


class _SwiGLU(torch.autograd.Function):
    """Computes silu(gate) * up and saves nothing but its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_x


class SwiGLU(torch.nn.Module):
    """Megatron's activation: [..., gate and up] to silu(gate) * up, [..., half] (Shazeer, 2020)."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
        return result


class Rotary:
    """The cosines and sines of the rotary embedding (Su et al., 2021), which rotates halves against each other."""

    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies.float()  # [width / 2]

    @lru_cache(maxsize=64)  # noqa: B019  (one object per model, held by its layers)
    def __call__(self, seq: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [seq, width / 2] each, in the compute type, as transformers and vLLM have them."""
        angles = torch.outer(torch.arange(seq, dtype=torch.float32), self._frequencies)
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate `x` [..., seq, width] into `out`, of the same shape and any strides, and return `out`."""
    sign = -1.0 if inverse else 1.0
    (x1, x2), (out1, out2) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=sign)
    return out


@lru_cache(maxsize=16)
def _causal_mask(seq: int, queries_per_group: int, device: torch.device) -> Tensor:
    """Return [1, queries_per_group x seq, seq] float32: -inf above the diagonal, zero elsewhere."""
    return _last_rows_of_mask(seq, seq, queries_per_group, device)


def _last_rows_of_mask(rows: int, seq: int, queries_per_group: int, device: torch.device) -> Tensor:
    """Return the last `rows` rows of the causal mask of each query head: [1, queries_per_group x rows, seq] float32."""
    mask = torch.full((rows, seq), float("-inf"), device=device).triu_(1 + seq - rows)
    return mask.repeat(queries_per_group, 1)[None]


def _rotated(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, observe: Observe | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys, each [seq, batch, heads, width], and lay them out for products of whole groups.

    Returns:
        Queries [batch x groups, group's queries, seq, width], and keys and values [batch x groups, seq, width].
    """
    seq, batch, heads, width = query.shape
    groups = key.shape[2]
    each = heads // groups
    q = query.new_empty(batch, groups, each, seq, width)
    _rotate(query.view(seq, batch, groups, each, width).permute(1, 2, 3, 0, 4), cos, sin, q)
    k = _rotate(key.permute(1, 2, 0, 3), cos, sin, key.new_empty(batch, groups, seq, width)).flatten(0, 1)
    v = value.permute(1, 2, 0, 3).contiguous().flatten(0, 1)
    if observe is not None:
        observe(q.flatten(1, 2), k.view(batch, groups, seq, width), v.view(batch, groups, seq, width))
    return q.flatten(0, 1), k, v


def _attention_weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(width) + mask) in the type of `q`, with scores in float32.

    Args:
        q: [groups, rows, width].
        k: [groups, seq, width].
        mask: [1, rows, seq].
    """
    scores = torch.baddbmm(mask, q.float(), k.float().mT, alpha=q.shape[-1] ** -0.5)
    return torch.softmax(scores, -1).to(q.dtype)


def _attend_without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention's output [groups, group's queries, seq, width] with at most `MAX_SCORES` scores at a time.

    Args:
        q: [groups, group's queries, seq, width].
        k: [groups, seq, width].
        v: [groups, seq, width].
    """
    groups, each, seq, width = q.shape
    rows = max(1, MAX_SCORES // (groups * each * seq))
    if rows >= seq:  # the same products as with a gradient
        weights = _attention_weights(q.view(groups, each * seq, width), k, _causal_mask(seq, each, q.device))
        return torch.bmm(weights, v).view(groups, each, seq, width)
    context = torch.empty_like(q)
    for start in range(0, seq, rows):
        end = min(start + rows, seq)
        mask = _last_rows_of_mask(end - start, end, each, q.device)
        weights = _attention_weights(q[:, :, start:end].flatten(1, 2), k[:, :end], mask)
        context[:, :, start:end] = torch.bmm(weights, v[:, :end]).view(groups, each, end - start, width)
    return context


class _RotaryCausalAttention(torch.autograd.Function):
    """Rotates queries and keys and computes grouped-query attention, with scores and softmax in float32.

    The queries of one group lie below each other as [group's queries x seq], so that a group is one matrix product.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, observe: Observe | None
    ) -> Tensor:
        seq, batch, heads, width = query.shape
        groups = key.shape[2]
        each = heads // groups
        q, k, v = _rotated(query, key, value, cos, sin, observe)
        q = q.flatten(1, 2)
        weights = _attention_weights(q, k, _causal_mask(seq, each, q.device))  # [batch x groups, each x seq, seq]
        ctx.save_for_backward(q, k, v, weights, cos, sin)
        ctx.shape = (seq, batch, groups, each, width)
        context = torch.bmm(weights, v).view(batch, groups, each, seq, width)
        return context.permute(3, 0, 1, 2, 4).reshape(seq, batch, heads * width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, weights, cos, sin = ctx.saved_tensors
        seq, batch, groups, each, width = ctx.shape
        grad = grad.view(seq, batch, groups, each, width).permute(1, 2, 3, 0, 4).reshape(q.shape)
        grad_v = torch.bmm(weights.mT, grad)
        grad_weights = torch.bmm(grad, v.mT)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_q = torch.bmm(grad_scores, k).mul_(width**-0.5).view(batch, groups, each, seq, width)
        grad_k = torch.bmm(grad_scores.mT, q).mul_(width**-0.5).view(batch, groups, seq, width)
        grad_query = q.new_empty(seq, batch, groups, each, width)
        _rotate(grad_q, cos, sin, grad_query.permute(1, 2, 3, 0, 4), inverse=True)
        grad_key = q.new_empty(seq, batch, groups, width)
        _rotate(grad_k, cos, sin, grad_key.permute(1, 2, 0, 3), inverse=True)
        grad_value = grad_v.view(batch, groups, seq, width).permute(2, 0, 1, 3)
        return grad_query.flatten(2, 3), grad_key, grad_value, None, None, None


class RotaryCausalAttention(torch.nn.Module):
    """Megatron's `core_attention`, which rotates queries and keys too.

    Padding is on the right, so that the causal mask alone keeps it out of every result that is read. With a gradient,
    memory grows with the square of the sequence length; without one, at most `MAX_SCORES` scores exist at a time.
    """

    def __init__(self, config: Any, rotary: Rotary, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.observe: Observe | None = None
        """A function called in each forward pass, with rotated queries and what the engine's KV cache would hold."""
        self._rotary = rotary

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any) -> Tensor:
        """Return [seq, batch, heads x width], given [seq, batch, heads, width] with fewer heads in key and value."""
        cos, sin = self._rotary(query.shape[0], query.dtype, query.device)
        if not torch.is_grad_enabled():
            seq, batch, heads, width = query.shape
            context = _attend_without_gradient(*_rotated(query, key, value, cos, sin, self.observe))
            return context.view(batch, heads, seq, width).permute(2, 0, 1, 3).reshape(seq, batch, heads * width)
        result: Tensor = _RotaryCausalAttention.apply(query, key, value, cos, sin, self.observe)  # type: ignore[no-untyped-call]
        return result
