"""The exchange of gradients and parameters between data-parallel ranks, for gloo.

Ranks exchange parts, which are added here in the order of the ranks. A single rank, which would copy its gradients and
parameters to change nothing, exchanges nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 2**22
"""The number of elements for each rank that are sent at a time."""


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    """Give each rank the sum of its part of all ranks' inputs, added in the order of the ranks (collective).

    Args:
        output: [n], which may be this rank's part of `input`.
        input: [ranks x n].
    """
    assert op == dist.ReduceOp.SUM and not async_op, "specrl's gradients are sums, and nothing overlaps their exchange"
    size = dist.get_world_size(group)
    if size == 1:
        _copy(output, input)
        return
    parts, totals = torch.split(input.view(size, -1), CHUNK_ELEMENTS, 1), torch.split(output, CHUNK_ELEMENTS)
    for part, total in zip(parts, totals, strict=True):
        received = torch.empty_like(part, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, part.contiguous(), group=group)
        torch.sum(received, 0, out=total)


def all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Give each rank the inputs of all ranks (collective).

    Args:
        output: [ranks x n].
        input: [n], which may be this rank's part of `output`.
    """
    if dist.get_world_size(group) == 1:
        return _copy(output, input)
    return dist.all_gather_into_tensor(output, input, group=group, async_op=async_op)


def _copy(output: Tensor, input: Tensor) -> None:
    if output.data_ptr() != input.data_ptr():
        output.copy_(input)
