"""The inverse of `quantise`, for tests."""

from __future__ import annotations

import torch
from torch import Tensor


def dequantise(quantised: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the values [rows, columns] that `quantise` rounded."""
    rows, columns = quantised.shape
    per_element = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
    return (quantised.float() * per_element).to(dtype)
