"""Bubbles: the time from the end of an engine's own rollouts to the end of the slowest engine's is put to use.

Whatever an engine does meanwhile ends within one iteration or micro-step after the last one is done. Nothing of it
reaches a rollout: text made here is only ever a draft (invariants 1 and 2). The ranks of a tensor-parallel engine do
the same at the same time, as the first one decides. Engines say through the process group's store that they are done,
and share work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.distributed.distributed_c10d import PrefixStore, Store

from specrl.data.dealing import piece
from specrl.distributed import Ranks
from specrl.rollout.engine import Engine
from specrl.timeline import Span

POLL_SECONDS = 0.02
"""The least time between two questions whether all engines are done."""


@dataclass(frozen=True)
class EngineRank:
    """The place of a rank among the engines of its job, each of which has the same number of consecutive ranks."""

    engine: int
    num_engines: int
    is_first: bool = True
    """Whether it is the first rank of its engine."""

    @classmethod
    def of(cls, ranks: Ranks, engine_size: int) -> EngineRank:
        """The place of this rank where each engine has `engine_size` ranks."""
        engine, number = divmod(ranks.rank, engine_size)
        return cls(engine, ranks.world_size // engine_size, number == 0)


class BubbleCoordinator:
    """Counters of one generation after another, in the store that all ranks see.

    The first rank of an engine speaks for it; the others take over what that one decides (`Engine.agreed`). Between two
    generations all ranks pass through a collective. A rank that hangs meanwhile is for the job's supervisor to find.
    """

    def __init__(self, store: Store, place: EngineRank, poll_seconds: float = POLL_SECONDS) -> None:
        self._store = PrefixStore("specrl/bubbles", store)
        self._place, self._poll_seconds = place, poll_seconds
        self._round = 0
        self._all_done, self._asked_at = False, 0.0

    def open(self) -> None:
        """Begin a new generation."""
        if self._round and self._place.is_first and self._place.engine == 0:
            self._store.delete_key(f"done/{self._round}")
            self._store.delete_key(f"claimed/{self._round}")
        self._round += 1
        self._all_done, self._asked_at = False, 0.0

    def arrive(self) -> None:
        if self._place.is_first:
            self._all_done = self._store.add(f"done/{self._round}", 1) == self._place.num_engines

    def all_done(self) -> bool:
        now = time.monotonic()
        if self._place.is_first and not self._all_done and now - self._asked_at >= self._poll_seconds:
            self._asked_at = now
            self._all_done = self._store.add(f"done/{self._round}", 0) == self._place.num_engines
        return self._all_done

    def claim(self, total: int, at_least: int = 1) -> range:
        """Claim the next items, at least so many if there are, of a list of `total` that is the same on every rank.

        What is left is divided by the number of engines but the one that the others wait for: an iteration takes little
        longer with many requests than with few.
        """
        if not self._place.is_first:
            return range(0)
        left = total - self._store.add(f"claimed/{self._round}", 0)
        if left <= 0:
            return range(0)
        size = max(at_least, piece(left, self._place.num_engines))
        start = self._store.add(f"claimed/{self._round}", size) - size
        return range(min(start, total), min(start + size, total))


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
