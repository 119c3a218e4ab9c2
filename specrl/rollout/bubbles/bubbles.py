"""Bubbles: the time from the end of an engine's own rollouts to the end of the slowest engine's is put to use.

Whatever an engine does meanwhile ends within one iteration or micro-step after the last one is done. Nothing of it
reaches a rollout: text made here is only ever a draft (invariants 1 and 2). The ranks of a tensor-parallel engine do
the same at the same time, as the first one decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from specrl.rollout.bubbles.coordinator import BubbleCoordinator
from specrl.rollout.engine import Engine
from specrl.timeline import Span


class Activity(Protocol):
    """A use of idle time."""

    name: str

    def work(self, stop: Callable[[], bool]) -> bool:
        """Work until `stop()` (collective over the engine); return False, at once, when there is nothing to do."""
        ...


def put_to_use(engine: Engine, coordinator: BubbleCoordinator, uses: Sequence[Activity]) -> list[Span]:
    """Work from the end of this engine's own share to the end of the last one's, on each use until it has nothing left.

    Pre-generation is to come first: a token of it saves most of an iteration for its request in the next step.
    """
    coordinator.arrive()
    left, spans = list(uses), list[Span]()
    while left and not engine.agreed(coordinator.all_done())[0]:
        started = time.time()
        worked = left[0].work(coordinator.all_done)
        if worked:
            spans.append(Span(left[0].name, started, time.time()))
        if not engine.true_on_any_rank(worked):
            left.pop(0)
    return spans
