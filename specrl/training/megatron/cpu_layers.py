"""The parts of a transformer layer between its matrix products, for CPUs, in few passes over memory and in float32.

Megatron's local layers leave these to autograd, operation by operation, which on a CPU costs as much as the matrix
products. Each function here saves what its backward pass needs and no more.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specrl.training.megatron.cpu import kernels
from specrl.training.megatron.cpu.weights import sum_of

BLOCK_ELEMENTS = 2**17
"""The number of elements that each thread works on at a time where several operations follow each other."""


class _RMSNorm(torch.autograd.Function):
    """Computes y = w x / sqrt(mean(x^2) + eps) along the last dimension (Zhang and Sennrich, 2019)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        result, scale = torch.empty_like(flat), torch.empty(flat.shape[0], 1, device=x.device)
        if kernels.take(flat, weight):
            kernels.rms_norm(*flat.shape, eps, flat, weight, result, scale)
        else:
            _normalise(flat, weight, eps, result, scale)
        ctx.save_for_backward(flat, weight, scale)
        ctx.sum = sum_of(weight)
        return result.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        flat = grad.reshape(x.shape).contiguous()
        grad_x = torch.empty_like(x)
        if kernels.take(x, weight, flat):
            grad_weight = torch.zeros(torch.get_num_threads(), x.shape[1])
            kernels.rms_norm_backward(*x.shape, x, flat, weight, scale, grad_x, grad_weight)
            grad_weight = grad_weight.sum(0)
        else:
            grad_weight = _normalise_backward(x, flat, weight, scale, grad_x)
        if ctx.sum is not None:
            ctx.sum.add_(grad_weight)
        return grad_x.view(grad.shape), grad_weight.to(weight.dtype) if ctx.sum is None else None, None


def _normalise(x: Tensor, weight: Tensor, eps: float, result: Tensor, scale: Tensor) -> None:
    width, weight32 = x.shape[1], weight.float()
    for rows in _row_blocks(x):
        normed = x[rows].to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(normed, dim=-1, keepdim=True)
        scale[rows] = norm.square_().div_(width).add_(eps).rsqrt_()
        result[rows] = normed.mul_(scale[rows]).mul_(weight32)


def _normalise_backward(x: Tensor, grad: Tensor, weight: Tensor, scale: Tensor, grad_x: Tensor) -> Tensor:
    width, weight32 = x.shape[1], weight.float()
    grad_weight = torch.zeros_like(weight32)
    for rows in _row_blocks(x):
        normed = x[rows].float() * scale[rows]
        grad32 = grad[rows].to(torch.float32, copy=True)
        product = grad32 * normed
        grad_weight.add_(product.sum(0))
        inner = product.mv(weight32).div_(-width)[:, None]
        grad_x[rows] = grad32.mul_(weight32).addcmul_(normed, inner).mul_(scale[rows])
    return grad_weight


def _row_blocks(matrix: Tensor) -> list[slice]:
    """Return the rows of a [rows, width] matrix in blocks of which a few in float32 fit into a core's cache."""
    rows = max(1, BLOCK_ELEMENTS * torch.get_num_threads() // matrix.shape[1])
    return [slice(start, start + rows) for start in range(0, matrix.shape[0], rows)]


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
        x = x.contiguous()
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        if not kernels.take(x):
            return F.silu(gate).mul_(up)
        result = x.new_empty(up.shape)
        kernels.swiglu(up[..., 0].numel(), up.shape[-1], x, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        grad, grad_x = grad.contiguous(), torch.empty_like(x)
        if kernels.take(x, grad):
            kernels.swiglu_backward(up[..., 0].numel(), up.shape[-1], x, grad, grad_x)
            return grad_x
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


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate `x` [..., seq, width] into `out`, of the same shape and any strides, and return `out`."""
    sign = -1.0 if inverse else 1.0
    (x1, x2), (out1, out2) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=sign)
    return out
