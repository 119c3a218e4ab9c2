"""Rectangles of named tensors, with which the shards of one layout are found in the shards of another.

A rank's share of a parameter is a range of the flattened matrix that it holds, and this matrix consists of rows of
Hugging Face tensors. In terms of these tensors the range is a list of rectangles, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

MASTER = "master"
KINDS = (MASTER, "exp_avg", "exp_avg_sq")
"""The stored values of every element of the policy: its FP32 master weight and Adam's two moments."""
REFERENCE = "reference"
"""The name under which a renewed reference's parameters are stored beside them, in FP32."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor, by its Hugging Face name; a vector is a matrix with one column."""

    tensor: str
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def overlap(self, other: Piece) -> Piece | None:
        rows = max(self.rows[0], other.rows[0]), min(self.rows[1], other.rows[1])
        columns = max(self.columns[0], other.columns[0]), min(self.columns[1], other.columns[1])
        return Piece(self.tensor, rows, columns) if rows[0] < rows[1] and columns[0] < columns[1] else None

    def inside(self, outer: Piece) -> tuple[slice, slice]:
        """The rows and columns of this rectangle relative to the corner of one that contains it."""
        row, column = outer.rows[0], outer.columns[0]
        return slice(self.rows[0] - row, self.rows[1] - row), slice(self.columns[0] - column, self.columns[1] - column)


def stored_name(kind: str, piece: Piece) -> str:
    (first, last), (left, right) = piece.rows, piece.columns
    return f"{kind}/{piece.tensor}[{first}:{last},{left}:{right}]"


@dataclass(frozen=True)
class Band:
    """Whole rows of a rank's matrix that form a rectangle of one Hugging Face tensor."""

    first: int
    piece: Piece


@dataclass(frozen=True)
class Shard:
    """A rank's share of one parameter: the same elements of the master weight and of the optimizer's moments."""

    pieces: tuple[Piece, ...]
    state: Mapping[str, Tensor]
    """Flat FP32 tensors by their name in `KINDS`, and `REFERENCE` where there is one; their elements are those of the
    pieces, in order."""
    is_written: bool
    """Whether this rank writes it to checkpoints; other ranks may hold a copy."""


def cut(bands: Iterable[Band], start: int, stop: int) -> list[Piece]:
    """The rectangles that hold the elements `start` to `stop - 1` of a rank's flattened matrix, in order.

    Rows after the last band are padding.
    """
    found: list[Piece] = []
    for band in bands:
        begin = band.first * band.piece.shape[1]
        first, last = max(start - begin, 0), min(stop - begin, band.piece.size)
        if first < last:
            found += _rectangles(band.piece, first, last)
    return found


def _rectangles(piece: Piece, start: int, stop: int) -> list[Piece]:
    width, left = piece.shape[1], piece.columns[0]

    def rectangle(first: int, last: int, begin: int, end: int) -> Piece:
        row = piece.rows[0]
        return Piece(piece.tensor, (row + first, row + last), (left + begin, left + end))

    (first, begin), (last, end) = divmod(start, width), divmod(stop, width)
    if first == last:
        return [rectangle(first, first + 1, begin, end)]
    found = []
    if begin:
        found.append(rectangle(first, first + 1, begin, width))
        first += 1
    if first < last:
        found.append(rectangle(first, last, 0, width))
    if end:
        found.append(rectangle(last, last + 1, 0, end))
    return found
