"""Matched rounds, in each of which every variant generates the same requests once, in an order that changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from specrl.bench.job import BenchJob
from specrl.bench.pages import Rows, table, write_results
from specrl.bench.spread import order_of, ratios
from specrl.bench.stock import StockEngine
from specrl.rollout.engine import Engine, Generation, Request
from specrl.validation.speed import Measurement

LEAST_REQUESTS = 8  # per round, one batch after another; fewer would say little
RATE = {"tokens/s": "tokens_per_s", "speedup": "speedup"}  # columns of `compared`, by title
ACCEPTANCE = {"acceptance length": "acceptance_length", "by position": "acceptance_rate_per_pos"}
ROUNDS = """
Every round runs every variant once on the same requests (same prompts, weights and seeds; the order changes by round).
The speedup of a round is the ratio of its tokens per second to those of plain decoding in that round, shown as the
median of {rounds} rounds with the least and the greatest. {differing} of {total} responses with drafts differ from
those of plain decoding in the same round; only rounding, which depends on the batch shape, may decide a near-tie.
"""


@dataclass(frozen=True)
class Variant:
    """An engine and the length of its drafts, of which `k = 0` is plain decoding."""

    facts: Mapping[str, Any]  # what drafts, as columns
    k: int | str
    engine: Engine

    def generate(self, requests: list[Request], batch: int) -> list[Generation]:
        """Generate `batch` requests at a time, with no prompt cached."""
        if self.engine.speculates:
            self.engine.set_k(None if isinstance(self.k, str) else self.k)
        self.engine.reset_prefix_cache()
        return [self.engine.generate(requests[start : start + batch]) for start in range(0, len(requests), batch)]


def rounds_of(requests: Sequence[Request], batch: int, repeats: int) -> list[list[Request]]:
    """Go through the requests in turn, a batch or `LEAST_REQUESTS` in each round, and begin again at their end."""
    count = max(batch, LEAST_REQUESTS)
    return [[requests[(start * count + place) % len(requests)] for place in range(count)] for start in range(repeats)]


def measure(
    variants: Sequence[Variant | StockEngine], rounds: Sequence[list[Request]], batch: int
) -> list[Measurement]:
    """Run each variant once in each round, `batch` requests at a time, after uncounted runs that warm up.

    All variants of a round do the same work, since drafts change no token. The order changes, so that a machine that
    slows down or speeds up favours none of them.
    """
    measured = [Measurement() for _ in variants]
    for variant in (*variants, *variants):  # twice, because an adaptive one learns what is accepted, to choose k
        variant.generate(rounds[0], batch)
    for number, requests in enumerate(rounds):
        for index in order_of(len(variants), number):
            measured[index].generations.append(variants[index].generate(requests, batch))
    return measured


def rows_of(variants: Sequence[Variant], measured: Sequence[Measurement], batch: int) -> list[dict[str, Any]]:
    """The rows of variants, of which the first one is plain decoding."""
    pairs = zip(variants, measured, strict=True)
    return [{**one.facts, "k": one.k, "batch": batch, **compared(own, measured[0])} for one, own in pairs]


def compared(own: Measurement, plain: Measurement) -> dict[str, Any]:
    """The columns of acceptance, equal tokens, and speed beside plain decoding in the same rounds."""
    stats = own.stats
    return {
        "tokens_per_s": median(own.rates),
        **ratios(own.rates, plain.rates).columns("speedup"),
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate_per_pos": list(stats.acceptance_rate_per_pos),
        "responses": len(own.tokens),
        "responses_differing": sum(a != b for a, b in zip(own.tokens, plain.tokens, strict=True)),
    }


def write_rounds(job: BenchJob, rows: Rows, title: str, how: str, columns: Mapping[str, str], rounds: int) -> None:
    """Write the rows and their page, on which `how` says what is special about these rounds."""
    drafted = [row for row in rows if row["k"] != 0]
    total, differing = (sum(row[name] for row in drafted) for name in ("responses", "responses_differing"))
    common = ROUNDS.format(rounds=rounds, total=total, differing=differing)
    write_results(job, rows, title, [how, common, table(rows, columns)])
