"""The exchange of gradients and parameters between data-parallel ranks on CPUs, as Megatron calls it.

A single rank, which would copy its gradients and parameters to change nothing, exchanges nothing.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from specrl.distributed import tensors


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    *,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> None:
    """Give each rank the sum of its part of all ranks' inputs, as `tensors.reduce_scatter` does (collective)."""
    assert op == dist.ReduceOp.SUM and not async_op, "specrl's gradients are sums, and nothing overlaps their exchange"
    tensors.reduce_scatter(output, input, group)


def all_gather(output: Tensor, input: Tensor, *, group: dist.ProcessGroup, async_op: bool = False) -> None:
    """Give each rank the inputs of all ranks, as `tensors.all_gather` does (collective)."""
    assert not async_op, "nothing overlaps the exchange of parameters"
    tensors.all_gather(output, input, group)
