"""Matched rounds: the order of the compared items, and ratios with their spread."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Spread(NamedTuple):
    median: float
    least: float
    greatest: float

    def columns(self, name: str) -> dict[str, float]:
        """The columns of a row; `name` is that of the median."""
        start = name.removesuffix("_ratio")
        return {name: self.median, f"{start}_min": self.least, f"{start}_max": self.greatest}


def ratios(fast: Sequence[float], slow: Sequence[float]) -> Spread:
    """The spread of `fast[i] / slow[i]`: both are from round i, so that disturbances of the round cancel."""
    found = [a / b for a, b in zip(fast, slow, strict=True)]
    return Spread(median(found), min(found), max(found))


def order_of(count: int, round: int) -> list[int]:
    """The order of a round: each starts with the next item; once every item has been first, the order reverses."""
    order = [(round + place) % count for place in range(count)]
    return order[::-1] if round // count % 2 else order
