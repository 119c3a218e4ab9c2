"""Rows of a tensor picked by their places, some of them several times, with a gradient that is the same every time."""

from __future__ import annotations

from torch import Tensor


def rows_of(values: Tensor, places: Tensor) -> Tensor:
    """`values[places]`, whose backward pass adds up the gradients of a row in a fixed order on every device.

    On CPUs the gradient of plain indexing is added up by several threads in no fixed order, on GPUs that of
    `index_select`.
    """
    return values[places] if values.is_cuda else values.index_select(0, places)
