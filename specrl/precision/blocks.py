"""Blockwise e4m3 quantisation of matrices: the pure arithmetic.

Sizes that no block divides are padded with zeros at the end (576 = 4.5 blocks of 128); the padding is not returned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_MAX = 448.0
"""Largest finite value of `torch.float8_e4m3fn`."""
BLOCK = 128
ALONG_ROWS = (1, BLOCK)
"""Activations and gradients of which the last dimension is summed over."""
ALONG_TOKENS = (BLOCK, 1)
"""The same where tokens, the first dimension, are summed over: weight gradients."""
SQUARE = (BLOCK, BLOCK)
"""Weights."""

MIN_AMAX = 2.0**-100
"""Blocks that are all zero get the scale of this, so that nothing is divided by zero."""
CHUNK_ELEMENTS = 2**19
"""Elements worked on at a time on a CPU: few enough to stay in its cache."""


def quantise(values: Tensor, block: tuple[int, int], *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Round to e4m3 with one scale per block.

    Args:
        values: [rows, columns], any float type.

    Returns:
        The rounded values, float8_e4m3fn [rows, columns], and FP32 scales [row blocks, column blocks], one for each
        block. Multiply them to get the values back.
    """
    blocks = _blocks(values, block)
    scales = _scales(blocks, power_of_two)
    rounded = (blocks / scales).flatten(2, 3).flatten(0, 1)
    return rounded[: values.shape[0], : values.shape[1]].to(torch.float8_e4m3fn), scales[:, 0, :, 0]


def fake_quantise(values: Tensor, block: tuple[int, int], *, power_of_two: bool = False) -> Tensor:
    """Return what `quantise` keeps of `values`, times the scales, in the type of `values`.

    Five times faster than casting to e4m3 and back.
    """
    rows, columns = values.shape
    result = torch.empty_like(values)
    padded_columns = -(-columns // block[1]) * block[1]
    step = max(block[0], CHUNK_ELEMENTS // padded_columns // block[0] * block[0])
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        blocks = _blocks(values[part], block)
        scales = _scales(blocks, power_of_two)
        _round_to_e4m3(blocks.div_(scales))
        dequantised = blocks.mul_(scales).flatten(2, 3).flatten(0, 1)
        result[part] = dequantised[: part.stop - start, :columns]
    return result


def fake_quantise_rows(weight: Tensor, sizes: Sequence[int], *, power_of_two: bool = False) -> Tensor:
    """`fake_quantise` of a weight that holds several matrices below each other: blocks begin anew at each of them.

    Args:
        sizes: rows of each matrix, of this rank.
    """
    if all(size % BLOCK == 0 for size in sizes[:-1]):
        return fake_quantise(weight, SQUARE, power_of_two=power_of_two)
    return torch.cat(
        [fake_quantise(part, SQUARE, power_of_two=power_of_two) for part in torch.split(weight, list(sizes))]
    )


def row_scales(weight: Tensor, sizes: Sequence[int], *, power_of_two: bool = False) -> Tensor:
    """The scales of `fake_quantise_rows`, float32 [row blocks of all matrices, column blocks]."""
    return torch.cat(
        [quantise(part, SQUARE, power_of_two=power_of_two)[1] for part in torch.split(weight, list(sizes))]
    )


def block_amax(values: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block: float32 [row blocks, column blocks]."""
    return _amax(_blocks(values, block))[:, 0, :, 0]


def _blocks(values: Tensor, block: tuple[int, int]) -> Tensor:
    """A float32 copy [row blocks, block rows, column blocks, block columns], zero where padded."""
    rows, columns = values.shape
    copy = values.to(torch.float32, copy=True)
    below, right = -rows % block[0], -columns % block[1]
    if below or right:
        copy = F.pad(copy, (0, right, 0, below))
    return copy.view((rows + below) // block[0], block[0], (columns + right) // block[1], block[1])


def _amax(blocks: Tensor) -> Tensor:
    """[row blocks, 1, column blocks, 1]."""
    sizes = (blocks.shape[1], blocks.shape[3])
    dims = [dim for dim, size in zip((1, 3), sizes, strict=True) if size > 1]
    return blocks.abs().amax(dims, keepdim=True) if dims else blocks.abs()


def _scales(blocks: Tensor, power_of_two: bool) -> Tensor:
    """amax / 448 per block, as [row blocks, 1, column blocks, 1]; NaN and infinity carry through."""
    # GPUs divide by a number as they multiply with its reciprocal: another last bit than a CPU's, which this avoids.
    largest = blocks.new_full((), E4M3_MAX)
    scales = _amax(blocks).clamp_(min=MIN_AMAX).div_(largest)
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)  # mantissa in [0.5, 1)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    return scales


def _round_to_e4m3(values: Tensor) -> None:
    """Round float32 magnitudes up to 448 to the nearest e4m3 value, ties to even, in place.

    Adding and subtracting 1.5 x 2^(e + 20), with e the value's exponent, leaves a multiple of 2^(e - 3): 3
    mantissa bits. Below 2^-6 e4m3 is subnormal and the step stays 2^-9.
    """
    exponent = values.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    anchor = exponent.clamp_(min=2.0**-6).mul_(1.5 * 2.0**20)
    values.add_(anchor).sub_(anchor)
