"""A model of the time of an engine iteration by what it does, fitted to recorded iterations, with their noise."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, pstdev

import numpy as np
from scipy.optimize import nnls

from specrl.bench.control.recording import RecordedIteration

BENDS = (16, 64)
"""The numbers of rows of a matrix product beyond which each further row may cost more."""
LONGEST_PAUSE = 4.0
"""The most that a recorded time may exceed the fitted one, as a factor; beyond it the machine was doing something else,
and this factor counts instead."""


def features(batch: int, drafted: int, k: int, parallel: bool) -> list[float]:
    """Return the quantities whose weighted sum is the time of an iteration; the weights are not negative.

    A drafter has k passes of one position of each request, or, if it is parallel, one pass of k positions. Either way
    it computes as many positions.

    Args:
        batch: As for `Machine.seconds`, and so are `drafted` and `k`.
        parallel: Whether the drafter drafts all positions in one pass.
    """
    rows = batch + drafted
    bent = [max(0.0, rows - bend) for bend in BENDS]
    passes = min(k, 1) if parallel else k
    return [1.0, float(batch), float(rows), *bent, float(passes), float(k * batch), float(k > 0)]


@dataclass(frozen=True)
class Machine:
    """The seconds of an iteration, and how much measured times differ from them."""

    coefficients: Sequence[float]
    """The seconds per unit of each of the `features`."""
    noise: Sequence[float] = field(default=(0.0,), repr=False)
    """The logs of measured over fitted seconds in the order of measurement, so that a machine that is slow for a while
    is so in a replay, too."""
    parallel: bool = False
    """Whether the drafter drafts all positions in one pass, and not each in a pass of its own."""

    def seconds(self, batch: int, drafted: int, k: int) -> float:
        """Return the expected time of an iteration.

        Args:
            batch: The number of requests.
            drafted: The number of draft tokens to verify and of prompt tokens to read, over all requests.
            k: The number of tokens that the drafter drafts for each request; 0 if it does not run.
        """
        return float(np.dot(self.coefficients, features(batch, drafted, k, self.parallel)))

    def drafting_seconds(self, batch: int, k: int) -> float:
        """Return how much of the expected time of an iteration the drafter takes."""
        return self.seconds(batch, 0, k) - self.seconds(batch, 0, 0)

    def pauses(self, seed: int) -> Pauses:
        """Return the noise of one replay."""
        return Pauses(self.noise, random.Random(seed).randrange(len(self.noise)))

    def spread(self) -> float:
        """Return the standard deviation of the log of a measured time."""
        return pstdev(self.noise)


@dataclass
class Pauses:
    """Noise that follows the recorded noise from a given position on, and begins again at its end."""

    noise: Sequence[float]
    position: int

    def factor(self) -> float:
        """Return the factor of measured over expected seconds for the next iteration."""
        self.position = (self.position + 1) % len(self.noise)
        return math.exp(self.noise[self.position])


def fit(runs: Sequence[Sequence[RecordedIteration]], *, parallel: bool) -> Machine:
    """Fit the model to recorded iterations, by the relative errors of median times over iterations that are alike.

    Iterations with drafts of both sources are left out, because it is not known in which of them the drafter ran.

    Args:
        parallel: Whether the drafter drafts all positions in one pass.
    """
    cells: dict[tuple[int, int, int], list[float]] = {}
    for run in runs:
        for item in run:
            if not (item.k and item.replay_k):
                cells.setdefault((item.batch, item.drafted, item.k), []).append(item.seconds)
    medians = {cell: median(seconds) for cell, seconds in cells.items()}
    weights = np.array([math.sqrt(len(cells[cell])) / seconds for cell, seconds in medians.items()])
    matrix = np.array([features(*cell, parallel) for cell in medians]) * weights[:, None]
    coefficients, _ = nnls(matrix, np.array(list(medians.values())) * weights)
    fitted = Machine(coefficients.tolist(), parallel=parallel)
    noise = [
        min(math.log(item.seconds / fitted.seconds(item.batch, item.drafted, item.k)), math.log(LONGEST_PAUSE))
        for run in runs
        for item in run
        if not (item.k and item.replay_k)
    ]
    middle = median(noise)
    return replace(fitted, noise=[value - middle for value in noise])


def error_on_both_sources(machine: Machine, runs: Sequence[Sequence[RecordedIteration]]) -> float:
    """Return measured over fitted seconds, minus 1, summed over the iterations that were left out of the fit."""
    items = [item for run in runs for item in run if item.k and item.replay_k]
    fitted = sum(machine.seconds(item.batch, item.drafted, item.k) for item in items)
    return sum(item.seconds for item in items) / fitted - 1 if items else 0.0


def accelerator(noise: Sequence[float], *, parallel: bool) -> Machine:
    """Return a model of an accelerator with this noise: 10 ms to read the weights, hundreds of rows at little cost.

    Args:
        parallel: Whether the drafter drafts all positions in one pass.
    """
    return Machine([0.010, 0.0, 0.00002, 0.0, 0.0, 0.0008, 0.0, 0.0], noise, parallel)


def mean_noise(machine: Machine) -> float:
    """Return by what fraction an iteration takes longer than expected on average."""
    return fmean(math.exp(value) for value in machine.noise) - 1
