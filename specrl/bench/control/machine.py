"""The time of an engine iteration by what it does, fitted to recorded iterations, with their noise."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

import numpy as np
from scipy.optimize import nnls

from specrl.bench.control.recording import RecordedIteration

BENDS = (16, 64)
"""Rows of a matrix product beyond which each further row may cost more."""
LONGEST_PAUSE = 4.0
"""Recorded iterations that took longer than so many times the fitted time count with this: the machine was away."""


def features(batch: int, drafted: int, passes: int) -> list[float]:
    """Return what the time of an iteration is a sum of, each with a coefficient that is not negative."""
    rows = batch + drafted
    bent = [max(0.0, rows - bend) for bend in BENDS]
    return [1.0, float(batch), float(rows), *bent, float(passes), float(passes * batch), float(passes > 0)]


@dataclass(frozen=True)
class Machine:
    """Seconds of an iteration, and how much measured times differ from them."""

    coefficients: Sequence[float]
    """Seconds per unit of each of `features`."""
    noise: Sequence[float] = field(default=(0.0,), repr=False)
    """Logs of measured over fitted seconds, in the order in which they were measured: what is slow for a while stays
    slow for a while in a replay, too."""

    def seconds(self, batch: int, drafted: int, passes: int) -> float:
        """Return the expected time of an iteration.

        Args:
            batch: requests.
            drafted: draft tokens that are verified, all requests together.
            passes: passes of the drafter.
        """
        return float(np.dot(self.coefficients, features(batch, drafted, passes)))

    def pauses(self, seed: int) -> Pauses:
        """Return the noise of one replay."""
        return Pauses(self.noise, random.Random(seed).randrange(len(self.noise)))

    def spread(self) -> float:
        """Return the standard deviation of the log of a measured time."""
        return pstdev(self.noise)


@dataclass
class Pauses:
    """Walks along the recorded noise from a random place, and begins anew at its end."""

    noise: Sequence[float]
    position: int

    def factor(self) -> float:
        """Return measured over expected seconds of the next iteration."""
        self.position = (self.position + 1) % len(self.noise)
        return math.exp(self.noise[self.position])


def fit(runs: Sequence[Sequence[RecordedIteration]]) -> Machine:
    """Fit the times of recorded iterations; their relative errors count, those of medians over equal iterations.

    Iterations with drafts of both sources are left out: whether the drafter ran is not known of each.
    """
    cells: dict[tuple[int, int, int], list[float]] = {}
    for run in runs:
        for item in run:
            if not (item.k and item.replay_k):
                cells.setdefault((item.batch, item.drafted, item.k), []).append(item.seconds)
    medians = {cell: median(seconds) for cell, seconds in cells.items()}
    weights = np.array([math.sqrt(len(cells[cell])) / seconds for cell, seconds in medians.items()])
    matrix = np.array([features(*cell) for cell in medians]) * weights[:, None]
    coefficients, _ = nnls(matrix, np.array(list(medians.values())) * weights)
    fitted = Machine(coefficients.tolist())
    noise = [
        min(math.log(item.seconds / fitted.seconds(item.batch, item.drafted, item.k)), math.log(LONGEST_PAUSE))
        for run in runs
        for item in run
        if not (item.k and item.replay_k)
    ]
    middle = median(noise)
    return Machine(coefficients.tolist(), [value - middle for value in noise])


def error_on_both_sources(machine: Machine, runs: Sequence[Sequence[RecordedIteration]]) -> float:
    """Return measured over fitted total seconds, minus 1, of the iterations that were left out of the fit."""
    items = [item for run in runs for item in run if item.k and item.replay_k]
    fitted = sum(machine.seconds(item.batch, item.drafted, item.k) for item in items)
    return sum(item.seconds for item in items) / fitted - 1 if items else 0.0


def accelerator(noise: Sequence[float]) -> Machine:
    """Return an accelerator with as noisy times: 10 ms to read the weights, hundreds of rows for next to nothing."""
    return Machine([0.010, 0.0, 0.00002, 0.0, 0.0, 0.0008, 0.0, 0.0], noise)


def mean_noise(machine: Machine) -> float:
    """Return how much longer than expected an iteration takes on average."""
    return fmean(math.exp(value) for value in machine.noise) - 1
