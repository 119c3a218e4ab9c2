"""Matched rounds: the order of what is compared, and ratios with their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


def ratios(fast: Sequence[float], slow: Sequence[float]) -> Spread:
    """The spread of `fast[i] / slow[i]`: both come from round i, so that what slows down that round cancels."""
    return Spread.of([a / b for a, b in zip(fast, slow, strict=True)])


def order_of(count: int, round: int) -> list[int]:
    """The order of a round: each begins with the next thing, and once all have begun one, it is reversed."""
    order = [(round + place) % count for place in range(count)]
    return order[::-1] if round // count % 2 else order
