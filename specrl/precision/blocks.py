"""Blockwise e4m3 quantisation of matrices.

Where the block size does not divide a dimension, such as 576 = 4.5 blocks of 128, the last block is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_MAX = 448.0
BLOCK = 128
ALONG_ROWS = (1, BLOCK)  # for products that sum over the last dimension
ALONG_TOKENS = (BLOCK, 1)  # for products that sum over tokens, the first dimension: weight gradients
SQUARE = (BLOCK, BLOCK)

MIN_AMAX = 2.0**-100  # so that blocks of zeros do not divide by zero


def fake_quantise(values: Tensor, block: tuple[int, int]) -> Tensor:
    """A matrix rounded to e4m3 in blocks with float32 scales, dequantised to the type of `values`."""
    if not values.numel():  # an expert without tokens
        return values
    rounded, scales = _rounded(values, block)
    return _as_matrix(rounded.float().mul_(scales), values).to(values.dtype)


def fake_quantise_rows(weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """`fake_quantise` of a weight in which matrices of these rows are stacked; blocks begin anew at each."""
    return torch.cat([fake_quantise(part, SQUARE) for part in torch.split(weight, list(sizes))])


def _rounded(values: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    blocks = _blocks(values, block)
    # A GPU divides by a Python number by multiplying with its reciprocal, whose last bit differs from a CPU's quotient.
    # Dividing by a tensor avoids this.
    largest = blocks.new_full((), E4M3_MAX)
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp_(min=MIN_AMAX).div_(largest)
    return blocks.div_(scales).to(torch.float8_e4m3fn), scales


def _as_matrix(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten(2, 3).flatten(0, 1)[: like.shape[0], : like.shape[1]]


def _blocks(values: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = values.shape
    copy = values.to(torch.float32, copy=True)
    below, right = -rows % block[0], -columns % block[1]
    if below or right:
        copy = F.pad(copy, (0, right, 0, below))
    return copy.view((rows + below) // block[0], block[0], (columns + right) // block[1], block[1])
