"""Medians with their spread, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """The median, the least and the greatest of repeated measurements."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of these values."""
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.least:.2f} to {self.greatest:.2f})"


def ratios(fast: Sequence[float], slow: Sequence[float]) -> Spread:
    """Return the spread of `fast[i] / slow[i]`. Both come from round i, so that what slows down that round cancels."""
    return Spread.of([a / b for a, b in zip(fast, slow, strict=True)])


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a column whose name begins with `>` is aligned to the right."""
    names = [column.removeprefix(">") for column in columns]
    rules = ["---:" if column.startswith(">") else "---" for column in columns]
    return "\n".join("| " + " | ".join(line) + " |" for line in (names, rules, *rows)) + "\n"


def per_position(rates: Sequence[float]) -> str:
    """Return acceptance rates by position of the draft, as one cell of a table."""
    return " / ".join(f"{rate:.2f}" for rate in rates) or "-"
