"""Pearson's chi-squared test of sampled sequences against their exact probabilities, on pooled cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scipy import stats

Cell = TypeVar("Cell", bound=Hashable)
MIN_EXPECTED = 5.0
"""Cells that are expected less often than this are pooled."""


@dataclass(frozen=True)
class ChiSquared:
    """The result of one test, or of several independent ones together."""

    statistic: float
    degrees_of_freedom: int
    num_samples: int
    num_cells: int = 0
    """The number of cells among which samples fall; 0 for a single one, which tells nothing apart."""

    @property
    def p_value(self) -> float:
        """The upper tail of the chi-squared distribution; 1 if there was nothing to choose between."""
        return float(stats.chi2.sf(self.statistic, self.degrees_of_freedom)) if self.degrees_of_freedom else 1.0


def chi_squared(samples: Sequence[Cell], exact: Mapping[Cell, float]) -> ChiSquared:
    """Test samples of one distribution.

    Args:
        samples: What was drawn.
        exact: Probabilities, in any part of the distribution; what they leave out of the mass of 1 is one pooled cell.
    """
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
    statistic = float(stats.chisquare(observed, expected).statistic)
    num_cells = len(expected) if len(expected) > 1 else 0
    return ChiSquared(statistic, len(expected) - 1, total, num_cells)


def combined(tests: Sequence[ChiSquared]) -> ChiSquared:
    """Return independent tests as one: statistics and degrees of freedom add up."""
    return ChiSquared(
        sum(test.statistic for test in tests),
        sum(test.degrees_of_freedom for test in tests),
        sum(test.num_samples for test in tests),
        sum(test.num_cells for test in tests),
    )
