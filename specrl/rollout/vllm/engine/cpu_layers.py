"""Norms and SiLU of an engine on CPUs in one pass over memory each.

vLLM's CPU build has a kernel for norms, but vLLM calls it on GPUs alone: on CPUs a norm is eight of PyTorch's
operators, and SiLU with its product two. Between the matrix products of a small model that is a tenth of a generation.

The kernels compute each row from that row alone, in float32, and round once, as the trainer's do. So a token's
log-prob does not depend on how many rows share its batch, and drafts change no token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specrl.training.megatron.cpu import kernels

Normalise = Callable[[Tensor, Tensor, float], Tensor]
"""A function of rows x, [..., hidden], a weight w, [hidden], and eps that returns w x / sqrt(mean(x^2) + eps)."""
ROW_MULTIPLE = 16
"""vLLM's kernel takes rows of which the length is a multiple of this number; it knows no remainder."""


def use_kernels(model: nn.Module) -> None:
    """Let the norms and the SiLU of a module inside an engine use kernels, on a CPU.

    A compiled model is left as it is: the compiler fuses the operators with what is around them.
    """
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    normalise = _normalise if torch.cpu._is_avx512_bf16_supported() else _normalise_and_round
    layers: list[Any] = list(model.modules())
    for layer in layers:
        # A subclass may compute something else.
        if type(layer) is RMSNorm and _is_plain(layer):
            layer._forward_method = partial(rms_norm, layer, normalise)
        elif type(layer) is SiluAndMul:
            layer._forward_method = silu_and_mul


def _is_plain(norm: Any) -> bool:
    """Return whether a norm is of whole rows of a length that the kernel takes, and has a weight."""
    return bool(norm.has_weight) and norm.variance_size_override is None and norm.hidden_size % ROW_MULTIPLE == 0


def rms_norm(
    layer: Any, normalise: Normalise, x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return w x / sqrt(mean(x^2) + eps), [..., hidden], for a norm of vLLM's, in whose place this is called.

    Args:
        layer: The norm.
        normalise: Computes it, given all in one type.
        residual: Is added to `x` first; then the sum is returned too, in their type.
    """
    weight = layer.weight.data
    if x.dtype != weight.dtype:
        result: Tensor | tuple[Tensor, Tensor] = layer.forward_native(x, residual)
        return result
    # vLLM's kernel with the addition in it overwrites both, and others may hold the residual: features are read later.
    summed = x.contiguous() if residual is None else x + residual
    normed = normalise(summed, weight, layer.variance_epsilon)
    return normed if residual is None else (normed, summed)


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, eps)
    return normed


def _normalise_and_round(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Round BF16 to the nearest.

    Where a CPU has no instruction that does so, vLLM's kernel truncates, which biases all results towards zero.
    """
    if not kernels.take(x, weight):
        return _normalise(x, weight, eps)
    normed, width = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // width
    kernels.rms_norm(rows, width, eps, x, weight, normed, torch.empty(rows))
    return normed


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., width], given gate and up behind each other, [..., 2 * width].

    vLLM's own kernel takes an exponential at a time, which is slower than PyTorch's operators.
    """
    width = x.shape[-1] // 2
    x = x.contiguous()
    if not kernels.take(x):
        return nn.functional.silu(x[..., :width]).mul_(x[..., width:])
    result = x.new_empty(*x.shape[:-1], width)
    kernels.swiglu(result[..., 0].numel(), width, x, result)
    return result
