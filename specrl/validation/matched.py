"""Matched pairs: plain and speculative generation of the same tokens in turn, on one engine with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from specrl.artifacts import SpeedPair
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine, Generation, Request

Run = list[Generation]


def matched_pair(
    engine: Engine,
    requests: list[Request],
    batch: int,
    k: int | None,
    repeats: int,
    give_texts: Callable[[], None] | None = None,
) -> SpeedPair:
    """Generate all requests, `batch` at a time, plain and with `k` draft tokens, `repeats` times each, in turn.

    The same seeds give the same tokens, so that both are the same work. With `k` of None the cost model chooses.
    `give_texts` gives the engine all text to begin with, before each speculative repeat and outside of its time.
    """
    runs: dict[int | None, list[Run]] = {0: [], k: []}
    for repeat in range(repeats):
        for length in (0, k) if repeat % 2 == 0 else (k, 0):
            engine.set_k(length)
            engine.reset_prefix_cache()
            recall = give_texts is not None and length != 0
            if give_texts is not None and recall:
                give_texts()
            parts = [requests[i : i + batch] for i in range(0, len(requests), batch)]
            runs[length].append([engine.generate(part, recall=recall) for part in parts])
    engine.set_k(k)
    plain, speculative = [_rate(run) for run in runs[0]], [_rate(run) for run in runs[k]]
    ratios = [fast / slow for slow, fast in zip(plain, speculative, strict=True)]
    plain_steps = _decode_steps(runs[0][0])  # none where every response is a single token
    return SpeedPair(
        batch=batch,
        plain_tokens_per_s=median(plain),
        speculative_tokens_per_s=median(speculative),
        speedup=median(ratios),
        speedup_min=min(ratios),
        speedup_max=max(ratios),
        decode_step_reduction=1 - _decode_steps(runs[k][0]) / plain_steps if plain_steps else 0.0,
        tokens_equal=_share_equal(runs[0], runs[k]),
        token_share=_token_share(runs[k]),
    )


def _rate(run: Run) -> float:
    return sum(part.num_tokens for part in run) / sum(part.seconds for part in run)


def _decode_steps(run: Run) -> int:
    return sum(part.stats.decode_steps for part in run)


def _token_share(runs: Sequence[Run]) -> dict[str, float]:
    parts = [part for run in runs for part in run]
    by_source = SpeculationStats.merge(part.stats for part in parts).by_source
    num_tokens = sum(part.num_tokens for part in parts)
    return {source: counts.num_accepted_tokens / num_tokens for source, counts in by_source.items()}


def _share_equal(left: Sequence[Run], right: Sequence[Run]) -> float:
    plain, other = (
        [answer.tokens for run in runs for part in run for answer in part.responses] for runs in (left, right)
    )
    return sum(a == b for a, b in zip(plain, other, strict=True)) / len(plain)
