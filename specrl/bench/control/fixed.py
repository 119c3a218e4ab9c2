"""Fixed draft lengths, at which times are recorded and with which the controller is compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrl.bench.control.recording import RecordedIteration
from specrl.rollout.drafts.acceptance import DraftOutcome
from specrl.rollout.drafts.controller import Controller
from specrl.rollout.drafts.estimates import DraftLengths


class FixedLengths(Controller):
    """A controller that always chooses the same draft lengths, and keeps the times of all iterations."""

    def __init__(self, lengths: DraftLengths) -> None:
        super().__init__(lengths.k, lengths.replay_k, seed=0)
        self.lengths = lengths
        self.iterations: list[RecordedIteration] = []

    def choose(self, batch: int) -> DraftLengths:
        return self.lengths

    def budgets(self, lengths: DraftLengths, chances: NDArray[np.float64]) -> list[int]:
        return [int(np.count_nonzero(row)) for row in chances]

    def observe(
        self, batch: int, lengths: DraftLengths, seconds: float | None, outcomes: Sequence[DraftOutcome]
    ) -> None:
        if seconds is not None:
            drafted = sum(outcome.drafted for outcome in outcomes)
            self.iterations.append(RecordedIteration(lengths.k, lengths.replay_k, batch, drafted, seconds))
