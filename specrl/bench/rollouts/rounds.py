"""Matched rounds, in each of which every variant generates the same requests once, in an order that changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrl.bench.spread import Spread, order_of, ratios
from specrl.bench.stock import StockEngine
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine, Generation, Request

LEAST_REQUESTS = 8  # per round, one batch after another; fewer would say little


@dataclass(frozen=True)
class Workload:
    """Requests that are generated `batch` at a time, with other requests in each round."""

    batch: int
    rounds: list[list[Request]]

    @classmethod
    def of(cls, requests: Sequence[Request], batch: int, repeats: int) -> Workload:
        """Go through the requests in turn, a batch or `LEAST_REQUESTS` in each round, and begin again at their end."""
        count = max(batch, LEAST_REQUESTS)
        places = [[(start * count + i) % len(requests) for i in range(count)] for start in range(repeats)]
        return cls(batch, [[requests[place] for place in round] for round in places])


@dataclass(frozen=True)
class Variant:
    """An engine and the length of its drafts, of which `k = 0` is plain decoding."""

    method: str
    k: int | str
    engine: Engine

    def generate(self, requests: list[Request], batch: int) -> list[Generation]:
        """Generate `batch` requests at a time, with no prompt cached."""
        if self.engine.speculates:
            self.engine.set_k(None if isinstance(self.k, str) else self.k)
        self.engine.reset_prefix_cache()
        return [self.engine.generate(requests[start : start + batch]) for start in range(0, len(requests), batch)]


@dataclass(frozen=True)
class StockVariant:
    """Stock vLLM, which generates as many tokens after each prompt as the exact engines do."""

    engine: StockEngine
    lengths: Mapping[int, int]  # natural response lengths by the request's seed
    k: int = 0

    def generate(self, requests: list[Request], batch: int) -> list[Generation]:
        """The generations hold no tokens."""
        lengths = [min(request.max_tokens, self.lengths[request.seed]) for request in requests]
        parts = [lengths[start : start + batch] for start in range(0, len(requests), batch)]
        seconds = self.engine.generate(requests, lengths, batch)
        return [Generation([], SpeculationStats(), took, sum(part)) for part, took in zip(parts, seconds, strict=True)]


@dataclass
class Measurement:
    """The generations of one variant on one workload."""

    variant: Variant | StockVariant
    generations: list[list[Generation]] = field(default_factory=list)  # by round

    @property
    def rates(self) -> list[float]:
        """Tokens per second, by round."""
        return [
            sum(part.num_tokens for part in parts) / sum(part.seconds for part in parts) for parts in self.generations
        ]

    @property
    def stats(self) -> SpeculationStats:
        return SpeculationStats.merge(part.stats for parts in self.generations for part in parts)

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.tokens for parts in self.generations for part in parts for answer in part.responses]


def measure(variants: Sequence[Variant | StockVariant], workload: Workload) -> list[Measurement]:
    """Run each variant once in each round, after uncounted runs that warm up.

    All variants of a round do the same work, since drafts change no token. The order changes, so that a machine that
    slows down or speeds up favours none of them.
    """
    measured = [Measurement(variant) for variant in variants]
    for variant in variants:
        warm_up(variant, workload)
    for number, requests in enumerate(workload.rounds):
        for index in order_of(len(variants), number):
            measured[index].generations.append(variants[index].generate(requests, workload.batch))
    return measured


def warm_up(variant: Variant | StockVariant, workload: Workload) -> None:
    """Generate the first round uncounted, twice where an engine chooses its drafts: it learns what is accepted."""
    chooses = isinstance(variant, Variant) and isinstance(variant.k, str)
    for _ in range(1 + chooses):
        variant.generate(workload.rounds[0], workload.batch)


def compared(own: Measurement, plain: Measurement) -> dict[str, Any]:
    """The columns of acceptance, equal tokens, and speed beside plain decoding in the same rounds."""
    speedup, stats = ratios(own.rates, plain.rates), own.stats
    return {
        "tokens_per_s": Spread.of(own.rates).median,
        "speedup": speedup.median,
        "speedup_min": speedup.least,
        "speedup_max": speedup.greatest,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate_per_pos": list(stats.acceptance_rate_per_pos),
        "responses": len(own.tokens),
        "responses_differing": sum(a != b for a, b in zip(own.tokens, plain.tokens, strict=True)),
    }
