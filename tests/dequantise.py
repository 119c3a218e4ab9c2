"""The two halves of `fake_quantise`, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from specrl.precision.blocks import _as_matrix, _rounded


def quantise(values: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Round a matrix to e4m3, with scales float32 [row blocks, column blocks]; their product approximates it."""
    rounded, scales = _rounded(values, block)
    return _as_matrix(rounded, values), scales[:, 0, :, 0]


def dequantise(quantised: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the values [rows, columns] that `quantise` rounded."""
    rows, columns = quantised.shape
    per_element = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
    return (quantised.float() * per_element).to(dtype)
