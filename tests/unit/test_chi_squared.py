"""The chi-squared test that the exactness suites use."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from tests.exactness.chi_squared import chi_squared


def test_chi_squared_pools_and_agrees_with_scipy() -> None:
    exact = {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.004}
    generator = random.Random(0)
    samples = generator.choices([0, 1, 2, 3, 4], [0.5, 0.3, 0.15, 0.004, 0.046], k=1000)
    test = chi_squared(samples, exact)
    observed = [samples.count(0), samples.count(1), samples.count(2), samples.count(3) + samples.count(4)]
    wanted = stats.chisquare(observed, [500, 300, 150, 50])
    assert test.degrees_of_freedom == 3
    assert test.statistic == pytest.approx(wanted.statistic)
    assert test.p_value == pytest.approx(wanted.pvalue)
    assert chi_squared(generator.choices([0, 1], k=1000), exact).p_value < 1e-9
    assert chi_squared([0] * 900 + [9] * 100, {0: 1.0}).p_value == 1.0  # one cell only: nothing to choose between
