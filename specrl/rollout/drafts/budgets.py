"""Draft budgets: how many drafted tokens of each request are verified in the next iteration.

A drafted token is worth verifying if what it is expected to bring pays for its row. What a row costs depends on how
many there are: up to some number of rows an iteration takes as long as reading the weights does, beyond it arithmetic
adds time with every row. This is measured on the running batch. No budget changes a token.
"""

from __future__ import annotations

import contextlib

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from specrl.rollout.control import ControlSettings

BENDS = (8, 32, 128)
"""The numbers of rows beyond which each further row may cost more."""
REFIT_ITERATIONS = 8
"""The number of iterations after which the times of rows are fitted again."""
KEPT, LEAST_WEIGHT = 0.95, 0.1
"""The factor on the weight of earlier iterations at every fit, and the weight below which they are forgotten."""


class RowCosts:
    """The seconds of an iteration without drafting, by its number of rows, fitted to the latest iterations.

    A row is one token of one request in the policy's forward pass. The fit is a line that may bend upwards, never down.
    """

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = settings
        self._rows: dict[int, tuple[float, float]] = {}
        """The weight and the mean seconds of the latest iterations, by their number of rows."""
        self._slopes: NDArray[np.float64] | None = None
        self._since_fit = 0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one iteration."""
        weight, mean = self._rows.get(rows, (0.0, seconds))
        # One slow iteration, in which the machine did something else, must not count for many.
        seconds = min(seconds, 2 * mean)
        share = max(1 / self._settings.trial_window, 1 / (weight + 1))
        self._rows[rows] = min(weight + 1, self._settings.trial_window), mean + share * (seconds - mean)
        self._since_fit += 1
        if self._since_fit >= REFIT_ITERATIONS or self._slopes is None:
            self._fit()

    def seconds(self, rows: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Return the expected seconds for each number of rows; None until numbers of rows are known that differ."""
        return None if self._slopes is None else _features(rows) @ self._slopes

    def _fit(self) -> None:
        self._since_fit = 0
        if not self._rows:
            return
        rows = np.array(sorted(self._rows))
        weights, means = np.array([self._rows[count] for count in rows.tolist()]).T
        if not self._differ(rows, weights):
            return
        scale = np.sqrt(weights) / means  # errors are relative
        with contextlib.suppress(RuntimeError):  # it found no end in its iterations, and the earlier fit stays
            self._slopes, _ = nnls(_features(rows) * scale[:, None], means * scale)
        self._rows = {
            count: (KEPT * weight, mean) for count, (weight, mean) in self._rows.items() if KEPT * weight > LEAST_WEIGHT
        }

    def _differ(self, rows: NDArray[np.int64], weights: NDArray[np.float64]) -> bool:
        """Return whether there are a few iterations each with numbers of rows that differ by half at least."""
        few = self._settings.trial_iterations / 2
        small, large = rows[weights.cumsum() >= few], rows[weights[::-1].cumsum()[::-1] >= few]
        return len(small) > 0 and bool(large[-1] >= 1.5 * small[0])


def _features(rows: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.stack([np.ones(len(rows)), rows, *(np.maximum(0, rows - bend) for bend in BENDS)], axis=1)


def best_budgets(chances: NDArray[np.float64], seconds: NDArray[np.float64], margin: float = 0.0) -> list[int]:
    """Return how many drafted tokens of each request to verify, so that tokens come at the highest rate.

    The tokens likeliest to be accepted go first, which are always the first ones of a draft, and as many as bring the
    most expected tokens per second.

    Args:
        chances: For each drafted token the probability that it and all before it are accepted, [requests, places]; 0
            where a draft is shorter.
        seconds: The expected seconds of an iteration in which 0, 1, ... drafted tokens are verified, for as many as
            there are at least.
        margin: The share by which the rate must exceed that of verifying everything, or everything is verified.
    """
    order = np.argsort(-chances, axis=None, kind="stable")[: np.count_nonzero(chances)]
    gains = np.cumsum(chances.ravel()[order])
    rates = (len(chances) + np.concatenate([[0.0], gains])) / seconds[: len(gains) + 1]
    best = int(rates.argmax())
    if rates[best] <= (1 + margin) * rates[-1]:
        best = len(gains)
    counts: list[int] = np.bincount(order[:best] // chances.shape[1], minlength=len(chances)).tolist()
    return counts
