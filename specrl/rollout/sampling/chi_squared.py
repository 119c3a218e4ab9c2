"""Pearson's chi-squared test of sampled sequences against their exact probabilities, on pooled cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

Cell = TypeVar("Cell", bound=Hashable)
MIN_EXPECTED = 5.0
"""Cells expected less often are pooled."""


@dataclass(frozen=True)
class ChiSquared:
    statistic: float
    degrees_of_freedom: int
    num_samples: int

    @property
    def p_value(self) -> float:
        """Upper tail of the chi-squared distribution; 1 where there is nothing to choose between."""
        if self.degrees_of_freedom == 0:
            return 1.0
        half = torch.tensor([self.degrees_of_freedom / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


def chi_squared(samples: Sequence[Cell], exact: Mapping[Cell, float]) -> ChiSquared:
    """Test samples of one distribution, `exact` where it is given; what it leaves out of the mass of 1 is pooled."""
    total, counts = len(samples), Counter(samples)
    cells = [cell for cell, probability in exact.items() if probability * total >= MIN_EXPECTED]
    expected = [exact[cell] * total for cell in cells]
    observed = [float(counts[cell]) for cell in cells]
    rest_expected, rest_observed = total - sum(expected), total - sum(observed)
    if rest_expected >= MIN_EXPECTED or not cells:
        expected, observed = [*expected, rest_expected], [*observed, rest_observed]
    else:
        # Too few for a cell of their own: into the cell expected least often.
        smallest = expected.index(min(expected))
        expected[smallest] += rest_expected
        observed[smallest] += rest_observed
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e > 0)
    return ChiSquared(statistic, len(expected) - 1, total)


def combined(tests: Sequence[ChiSquared]) -> ChiSquared:
    """Independent tests as one: statistics and degrees of freedom add up."""
    return ChiSquared(
        sum(test.statistic for test in tests),
        sum(test.degrees_of_freedom for test in tests),
        sum(test.num_samples for test in tests),
    )
