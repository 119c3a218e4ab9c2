"""How far a training of the drafter has come, and what may happen between two of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass
class TrainingProgress:
    """The number of steps done, and what they add to the metrics of the last epoch, on one rank."""

    done: int
    loss: Tensor
    """float64 `[]`: this rank's part of the sum of the losses."""
    sums: Tensor
    """float64 `[steps + 1, 3]`: this rank's part of what `metrics_from_sums` reads."""
    norms: list[float]
    """The norm of each gradient, which is the same on all ranks."""


class Boundaries(Protocol):
    """What a training asks between its steps."""

    def restore(self, drafter: Any) -> TrainingProgress | None:
        """Restore the drafter of an interrupted training, if any, and say how far that was (collective)."""

    def wanted(self) -> bool:
        """Whether this rank wants `reached` to be called after the present step."""

    def reached(self, drafter: Any, progress: TrainingProgress) -> None:
        """Do what is to be done between two steps (collective); called on all ranks if any of them wants it."""
