"""The bubble coordinator: engines say through the process group's store that they are done or alive, and share work."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch.distributed.distributed_c10d import PrefixStore, Store

from specrl.data.dealing import piece
from specrl.distributed import Ranks

POLL_SECONDS, BEAT_SECONDS, STALE_SECONDS = 0.02, 5.0, 60.0
"""The least time between two questions whether all engines are done, and between two signs of life of an engine, and
the time without one after which no engine waits for it any more."""


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
    generations all ranks pass through a collective. Others would wait without end for an engine that dies, so each
    regularly gives a sign of life.
    """

    def __init__(
        self,
        store: Store,
        place: EngineRank,
        poll_seconds: float = POLL_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self._store = PrefixStore("specrl/bubbles", store)
        self._place = place
        self._poll_seconds, self._beat_seconds, self._stale_seconds = poll_seconds, beat_seconds, stale_seconds
        self._round = 0
        self._all_done = False
        self._asked_at = 0.0
        self._beat_at = 0.0
        self._looked_at = 0.0
        # The last heartbeat of each engine that is not done, and the monotonic time at which it was first seen.
        self._seen: dict[int, tuple[int, float]] = {}

    def open(self) -> None:
        """Begin a new generation."""
        if self._round and self._place.is_first and self._place.engine == 0:
            self._store.delete_key(f"done/{self._round}")
            self._store.delete_key(f"claimed/{self._round}")
        self._round += 1
        self._all_done, self._asked_at = False, 0.0
        self._seen, self._looked_at = {}, 0.0

    def beat(self) -> None:
        """Say that this engine is alive; to be called in every iteration."""
        now = time.monotonic()
        if self._place.is_first and now - self._beat_at >= self._beat_seconds:
            self._beat_at = now
            self._store.add(f"beat/{self._place.engine}", 1)

    def arrive(self) -> None:
        """Say that this engine's own share is done."""
        if not self._place.is_first:
            return
        self._store.add(f"rounds/{self._place.engine}", 1)
        self._all_done = self._store.add(f"done/{self._round}", 1) == self._place.num_engines

    def all_done(self) -> bool:
        """Whether every engine's share is done."""
        now = time.monotonic()
        if self._place.is_first and not self._all_done and now - self._asked_at >= self._poll_seconds:
            self._asked_at = now
            self._all_done = self._store.add(f"done/{self._round}", 0) == self._place.num_engines
        return self._all_done

    def over(self) -> bool:
        """Whether there is nobody left to wait for: all are done, or one that is not has been silent for long."""
        return self.all_done() or self._one_is_lost()

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

    def _one_is_lost(self) -> bool:
        now = time.monotonic()
        if self._place.is_first and now - self._looked_at >= self._beat_seconds:
            self._looked_at = now
            for engine in range(self._place.num_engines):
                if self._store.add(f"rounds/{engine}", 0) >= self._round:
                    self._seen.pop(engine, None)
                    continue
                beat = self._store.add(f"beat/{engine}", 0)
                if engine not in self._seen or self._seen[engine][0] != beat:
                    self._seen[engine] = (beat, now)
        return any(now - since > self._stale_seconds for _, since in self._seen.values())
