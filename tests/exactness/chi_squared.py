"""Pearson's chi-squared test of sampled sequences against their exact probabilities, on pooled cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

MIN_EXPECTED = 5.0
"""The expected count below which a cell is pooled with others."""


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
        """The probability of a statistic at least as large under the null hypothesis; 1 if there was only one cell."""
        return float(stats.chi2.sf(self.statistic, self.degrees_of_freedom)) if self.degrees_of_freedom else 1.0


def chi_squared[Cell: Hashable](samples: Sequence[Cell], exact: Mapping[Cell, float]) -> ChiSquared:
    """Test whether samples follow a distribution.

    Args:
        samples: The cells that were drawn, one for each sample.
        exact: The probabilities of some cells or all. Rare cells and those left out are pooled into one.
    """
    total, counts = len(samples), Counter(samples)
    cells = [cell for cell, probability in exact.items() if probability * total >= MIN_EXPECTED]
    expected = [exact[cell] * total for cell in cells]
    observed = [float(counts[cell]) for cell in cells]
    rest_expected, rest_observed = total - sum(expected), total - sum(observed)
    if rest_expected >= MIN_EXPECTED or not cells:
        expected, observed = [*expected, rest_expected], [*observed, rest_observed]
    else:
        # The rest is too rare for a cell of its own: it joins the cell that is expected least often.
        smallest = expected.index(min(expected))
        expected[smallest] += rest_expected
        observed[smallest] += rest_observed
    statistic = float(stats.chisquare(observed, expected).statistic)
    num_cells = len(expected) if len(expected) > 1 else 0
    return ChiSquared(statistic, len(expected) - 1, total, num_cells)
