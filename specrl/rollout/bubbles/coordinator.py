"""Bubbles: the use of the time between the end of an engine's own rollouts and the end of the slowest engine's.

Such work ends within one iteration or micro-step after the last engine is done. None of it reaches a rollout: text
generated here is only ever a draft (invariants 1 and 2). The ranks of a tensor-parallel engine act in lockstep, as
the first one decides. Engines announce through the process group's store that they are done, and divide work.
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
"""The minimum time between two checks whether all engines are done."""


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
    """The counters of successive generations, in the store that all ranks share.

    The first rank of an engine speaks for it; the others follow its decisions (`Engine.agreed`). All ranks pass
    through a collective between two generations. Detecting a rank that hangs is up to the job's supervisor.
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
        """Claim the next items, if possible `at_least` many, of a list of `total` that is the same on every rank.

        The rest is divided by the number of idle engines, all but the slowest: an iteration takes little longer with
        many requests than with few.
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
        """Work until `stop()` (collective over the engine); return False at once if there is nothing to do."""
        ...


def put_to_use(engine: Engine, coordinator: BubbleCoordinator, uses: Sequence[Activity]) -> list[Span]:
    """Work from the end of this engine's share to the end of the last engine's, exhausting each use in order.

    Pre-generation should come first: each of its tokens saves its request most of an iteration in the next step.
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
