"""Matched rounds: every side generates the same requests once per round, in an order that turns from round to round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from specrl.bench.settings import ADAPTIVE, TAIL
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine, Generation, Request

MOST_WARM_UPS = 8
"""Uncounted runs of a side on a workload."""


@dataclass(frozen=True)
class Workload:
    """Requests that are generated `batch` at a time, other ones in each round."""

    name: int | str
    """Batch size, or `tail64`."""
    batch: int
    rounds: list[list[Request]]


@dataclass(frozen=True)
class Side:
    """One way to generate: an engine and how far it drafts. `k = 0` is plain decoding."""

    method: str
    k: int | str
    engine: Engine
    compiled: bool

    def generate(self, requests: list[Request], batch: int) -> list[Generation]:
        """`batch` at a time, with no prompt cached."""
        if self.engine.speculates:
            self.engine.set_k(None if self.k == ADAPTIVE else int(self.k))
        self.engine.reset_prefix_cache()
        return [self.engine.generate(requests[start : start + batch]) for start in range(0, len(requests), batch)]


@dataclass
class Measured:
    """What one side did with one workload."""

    side: Side
    generations: list[list[Generation]] = field(default_factory=list)
    """By round."""

    @property
    def rates(self) -> list[float]:
        """Tokens per second, one per round."""
        return [
            sum(part.num_tokens for part in parts) / sum(part.seconds for part in parts) for parts in self.generations
        ]

    @property
    def stats(self) -> SpeculationStats:
        return SpeculationStats.merge(part.stats for parts in self.generations for part in parts)

    @property
    def iteration_seconds(self) -> float:
        """Wall time per engine iteration, prefills included."""
        return sum(part.seconds for parts in self.generations for part in parts) / max(self.stats.decode_steps, 1)

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.tokens for parts in self.generations for part in parts for answer in part.responses]


def measure(sides: Sequence[Side], workload: Workload, on_run: Callable[[], None] = lambda: None) -> list[Measured]:
    """Each side once in each round, after runs of the first round that are not counted: they warm up and calibrate.

    Invariant 1 makes all sides of a round the same work. The order begins with another side in each round and turns
    around in every second, so that a machine that slows down or speeds up favours none.
    """
    measured = [Measured(side) for side in sides]
    for side in sides:
        if side.k in (0, ADAPTIVE):
            warm_up(side, workload)
            on_run()
    for requests, order in zip(workload.rounds, orders(len(sides), len(workload.rounds)), strict=True):
        for index in order:
            measured[index].generations.append(sides[index].generate(requests, workload.batch))
            on_run()
    return measured


def warm_up(side: Side, workload: Workload) -> None:
    """Generate the first round until a controller has calibrated its batch sizes, which it does once in its life.

    The long-tailed batch runs through all of them up to its own.
    """
    for _ in range(MOST_WARM_UPS):
        side.generate(workload.rounds[0], workload.batch)
        controller = side.engine.controller if side.k == ADAPTIVE else None
        if controller is None:
            return
        sizes = [size for size in controller.chosen() if size <= workload.batch]
        if all(map(controller.is_settled, sizes if workload.name == TAIL else [workload.batch])):
            return


def orders(sides: int, rounds: int) -> list[list[int]]:
    """The order of the sides in each round."""
    turned = [[(start + offset) % sides for offset in range(sides)] for start in range(rounds)]
    return [order if index % 2 == 0 else order[::-1] for index, order in enumerate(turned)]


def strongest(plains: Sequence[Measured]) -> Measured:
    """The plain side with the highest median: what speculation is compared with."""
    return max(plains, key=lambda entry: median(entry.rates))


def differing(left: Measured, right: Measured) -> int:
    """Responses that are not the same, token for token, on both sides."""
    return sum(a != b for a, b in zip(left.tokens, right.tokens, strict=True))
