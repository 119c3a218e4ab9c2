"""Linear layers and embeddings that add their weights' gradients to Megatron's FP32 sums themselves.

Autograd would make a gradient of the weight's size and type for each micro-batch, add up those of a shared weight, and
leave it to Megatron's hook to turn it into float32 and add it. The embeddings alone are a fifth of a small model, and
a micro-batch reads only a few of their rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import specrl.training.megatron.cpu_shim  # noqa: F401  (must precede megatron)

# isort: split
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import Tensor

from specrl.training.megatron.cpu import kernels

CHUNK_ELEMENTS = 2**20
"""The number of a weight's gradients that are computed in its own type before they are added in float32."""


def add_weight_gradients(model: torch.nn.Module) -> None:
    """Give the linear layers and embeddings of a model, which are Megatron's own, the forward passes of this file."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module._forward_impl = linear
        elif isinstance(module, VocabParallelEmbedding):
            module.forward = partial(embed, module)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    **_: Any,
) -> Tensor:
    """Return this tensor-parallel rank's output [..., out] for the input [..., in]; the arguments are Megatron's."""
    if sequence_parallel:  # each rank has a part of the sequence, and gets that of its gradient
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    output: Tensor = _Linear.apply(input, weight, tp_group if allreduce_dgrad else None)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias


class _Linear(torch.autograd.Function):
    """Computes y = x W^T; dx = dy W; dW = dy^T x, which is added to `W.main_grad` where there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # [tokens, in]
        ctx.save_for_backward(flat, weight)
        ctx.sum, ctx.group, ctx.shape = sum_of(weight), group, x.shape
        output = x.new_empty(*x.shape[:-1], weight.shape[0])  # not a view: the head's logits are overwritten
        torch.mm(flat, weight.t(), out=output.view(-1, weight.shape[0]))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])  # [tokens, out]
        grad_x = grad_weight = reduced = None
        if ctx.needs_input_grad[0]:
            grad_x = flat.mm(weight)
            if ctx.group is not None:
                reduced = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(ctx.sum, flat, x)
        if reduced is not None:
            reduced.wait()
        return None if grad_x is None else grad_x.view(ctx.shape), grad_weight, None


def sum_of(parameter: Tensor) -> Tensor | None:
    """Return the FP32 sum of a parameter's gradients over micro-batches; None where nobody keeps it."""
    found: Tensor | None = getattr(parameter, "main_grad", None)
    return found


def _weight_gradient(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor | None:
    """Add dy^T x to `total` [out, in], or return it if there is no sum.

    Args:
        grad: dy, [tokens, out].
        x: [tokens, in].
    """
    if total is None:
        return grad.t().mm(x)
    if total.dtype == x.dtype:
        total.addmm_(grad.t(), x)
        return None
    rows = max(1, CHUNK_ELEMENTS // total.shape[1])  # so few that they are added while they are in the cache
    for part, columns in zip(torch.split(total, rows), torch.split(grad, rows, 1), strict=True):
        product = columns.t().mm(x)
        if kernels.take(product):
            kernels.add(*product.shape, product, part)
        else:
            part.add_(product)
    return None


def embed(module: Any, tokens: Tensor) -> Tensor:
    """Return what Megatron's `VocabParallelEmbedding` does: [1, tokens, hidden].

    With `reduce_scatter_embeddings` it is this rank's part of the sequence, [part of seq, batch, hidden].

    Args:
        module: The embedding layer.
        tokens: [1, tokens] int64.
    """
    weight, group = module.weight, module.tp_group
    if group.size() == 1:
        rows: Tensor = _Embedding.apply(tokens, weight, None)  # type: ignore[no-untyped-call]
        return rows
    inside = (tokens >= module.vocab_start_index) & (tokens < module.vocab_end_index)
    rows = _Embedding.apply((tokens - module.vocab_start_index) * inside, weight, inside)  # type: ignore[no-untyped-call]
    if module.reduce_scatter_embeddings:
        whole: Tensor = reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous(), group=group)
    else:
        whole = reduce_from_tensor_model_parallel_region(rows, group=group)
    return whole


class _Embedding(torch.autograd.Function):
    """Looks up rows of a matrix, zero where `inside` is False; the gradient goes to the rows that were read."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, inside: Tensor | None) -> Tensor:
        ctx.save_for_backward(tokens, weight, inside)
        ctx.sum = sum_of(weight)
        rows = weight[tokens]
        return rows if inside is None else rows.mul_(inside[..., None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        tokens, weight, inside = ctx.saved_tensors
        if inside is not None:
            tokens, grad = tokens[inside], grad[inside]
        total = torch.zeros_like(weight) if ctx.sum is None else ctx.sum
        total.index_add_(0, tokens.flatten(), grad.reshape(-1, grad.shape[-1]).to(total.dtype))
        return None, total if ctx.sum is None else None, None
