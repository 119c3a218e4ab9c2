"""How likely a drafter's tokens are to be accepted, learned from its own confidence in them.

A drafter's confidence is the probability that it gives the token that it drafts. It says which drafts are doubtful, but
not how doubtful: that depends on the temperature, on the precision, and on how far the policy has moved since the
drafter was trained. So what was accepted at which confidence is counted while generating.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import DRAFTER, DraftOutcome

CENTRES = np.array([0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.925, 0.97, 0.995])
"""The confidences for which acceptance is counted; each confidence counts for the nearest one."""
BORDERS = (CENTRES[1:] + CENTRES[:-1]) / 2


class Calibration:
    """The probability that a drafted token is accepted if those before it are, by its place and its confidence.

    For each place in the draft there is a small table, which never falls as confidence rises. A drafter that does not
    tell its confidence, such as a lookup of n-grams, has one probability for each place.
    """

    def __init__(self, k: int, settings: ControlSettings) -> None:
        """Begin by believing the drafter.

        Args:
            k: The longest draft, in tokens.
            settings: The constants that steer it.
        """
        self._settings = settings
        # The last column is for drafts without confidence.
        self._right = np.zeros((k, len(CENTRES) + 1))
        self._counts = np.zeros((k, len(CENTRES) + 1))
        self._tables = self._fitted()

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn from an iteration's drafts; those from text are ignored."""
        own = [outcome for outcome in outcomes if outcome.source == DRAFTER]
        if not own:
            return
        keep = (1 - 1 / self._settings.text_window) ** len(own)
        self._right *= keep
        self._counts *= keep
        for outcome in own:
            reached = min(outcome.accepted + 1, outcome.drafted)
            columns = [len(CENTRES)] * reached
            if outcome.confidences:
                columns = np.searchsorted(BORDERS, outcome.confidences[:reached]).tolist()
            for place, column in enumerate(columns):
                self._counts[place, column] += 1
                self._right[place, column] += place < outcome.accepted
        self._tables = self._fitted()

    def chances(self, confidences: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each drafted token the probability that it and all before it are accepted.

        Args:
            confidences: The drafter's confidence in each token, [requests, places].
        """
        each = [np.interp(confidences[:, place], CENTRES, self._tables[place]) for place in range(confidences.shape[1])]
        found: NDArray[np.float64] = np.multiply.accumulate(np.stack(each, axis=1), axis=1)
        return found

    def unconfident(self) -> NDArray[np.float64]:
        """Return the same for a draft of full length from a drafter that does not tell its confidence, [places]."""
        weight, guess = self._settings.prior_drafts, self._settings.guessed_acceptance
        each = (weight * guess + self._right[:, -1]) / (weight + self._counts[:, -1])
        found: NDArray[np.float64] = np.multiply.accumulate(each)
        return found

    def fade(self) -> None:
        """Let new drafts soon outweigh the old ones, because policy or drafter has changed."""
        self._right *= self._settings.kept_on_refit
        self._counts *= self._settings.kept_on_refit
        self._tables = self._fitted()

    def _fitted(self) -> list[NDArray[np.float64]]:
        return [self._table(place) for place in range(len(self._right))]

    def _table(self, place: int) -> NDArray[np.float64]:
        """Return the acceptance at each of `CENTRES`; where little was seen it is near the confidence itself."""
        weights = self._settings.prior_drafts + self._counts[place, :-1]
        values = (self._settings.prior_drafts * CENTRES + self._right[place, :-1]) / weights
        return rising(values, weights)


def rising(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sequence nearest to `values` in weighted squares that never falls, by pooling neighbours that do."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (left, left_weight, left_count), (right, right_weight, right_count) = pools[-2:]
            both = left_weight + right_weight
            mean = (left * left_weight + right * right_weight) / both
            pools[-2:] = [(mean, both, left_count + right_count)]
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])


def as_matrix(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return rows of different lengths as one matrix, filled up with zeros; there is at least one column."""
    found = np.zeros((len(rows), max(1, *map(len, rows))) if rows else (0, 1))
    for index, row in enumerate(rows):
        found[index, : len(row)] = row
    return found
