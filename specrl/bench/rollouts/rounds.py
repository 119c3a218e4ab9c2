"""Matched rounds: in each, every variant generates for the same requests once, in a changing order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from specrl.bench.job import BenchJob
from specrl.bench.pages import Rows, order_of, ratios, table, write_results
from specrl.bench.stock import StockEngine
from specrl.rollout.engine import Engine, Generation, Request
from specrl.validation.speed import Measurement

LEAST_REQUESTS = 8  # per round, one batch after another; fewer would be too noisy
RATE = {"tokens/s": "tokens_per_s", "speedup": "speedup"}  # columns of `compared`, by title
ACCEPTANCE = {"acceptance length": "acceptance_length", "by position": "acceptance_rate_per_pos"}
ROUNDS = """
Every round runs every variant once on the same requests (same prompts, weights and seeds; the order changes by round).
A speedup is the ratio of a variant's tokens per second to those of plain decoding in the same round: the median of
{rounds} rounds, with the lowest and the highest. {differing} of {total} responses with drafts differ from those of
plain decoding in the same round; only rounding at near-ties, which depends on the batch shape, may cause this.
"""


@dataclass(frozen=True)
class Variant:
    """An engine and its draft length; `k = 0` is plain decoding."""

    facts: Mapping[str, Any]  # what drafts, as columns of a row
    k: int | str
    engine: Engine

    def generate(self, requests: list[Request], batch: int) -> list[Generation]:
        """Generate `batch` requests at a time, without cached prompts."""
        if self.engine.speculates:
            self.engine.set_k(None if isinstance(self.k, str) else self.k)
        self.engine.reset_prefix_cache()
        return [self.engine.generate(requests[start : start + batch]) for start in range(0, len(requests), batch)]


def rounds_of(requests: Sequence[Request], batch: int, repeats: int) -> list[list[Request]]:
    """Cycle through the requests, taking a batch or `LEAST_REQUESTS` for each round."""
    count = max(batch, LEAST_REQUESTS)
    return [[requests[(start * count + place) % len(requests)] for place in range(count)] for start in range(repeats)]


def measure(
    variants: Sequence[Variant | StockEngine], rounds: Sequence[list[Request]], batch: int
) -> list[Measurement]:
    """Run each variant once in each round, `batch` requests at a time, after uncounted warm-up runs.

    All variants of a round produce the same tokens, since drafts change none. The order changes so that a machine that
    slows down or speeds up favours none of them.
    """
    measured = [Measurement() for _ in variants]
    for variant in (*variants, *variants):  # twice, because adaptive drafting learns acceptance before it chooses k
        variant.generate(rounds[0], batch)
    for number, requests in enumerate(rounds):
        for index in order_of(len(variants), number):
            measured[index].generations.append(variants[index].generate(requests, batch))
    return measured


def rows_of(variants: Sequence[Variant], measured: Sequence[Measurement], batch: int) -> list[dict[str, Any]]:
    """Make the rows of variants, the first of which is plain decoding."""
    pairs = zip(variants, measured, strict=True)
    return [{**one.facts, "k": one.k, "batch": batch, **compared(own, measured[0])} for one, own in pairs]


def compared(own: Measurement, plain: Measurement) -> dict[str, Any]:
    """The columns for acceptance, equal tokens, and speed against plain decoding in the same rounds."""
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
    """Write the rows and their page; `how` says what is special about these rounds."""
    drafted = [row for row in rows if row["k"] != 0]
    total, differing = (sum(row[name] for row in drafted) for name in ("responses", "responses_differing"))
    common = ROUNDS.format(rounds=rounds, total=total, differing=differing)
    write_results(job, rows, title, [how, common, table(rows, columns)])
