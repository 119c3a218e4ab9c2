"""Matched pairs: plain and speculative generation of the same tokens in turn, on one engine with the same weights."""

from __future__ import annotations

from statistics import median

from specrl.artifacts import SpeedPair
from specrl.rollout.engine import Engine, Generation, Request


def matched_pair(engine: Engine, requests: list[Request], batch: int, k: int | None, repeats: int) -> SpeedPair:
    """Generate all requests, `batch` at a time, plain and with `k` draft tokens in turn, `repeats` times each.

    Invariant 1 makes both the same work: the same seeds give the same tokens. Which of the two goes first alternates,
    so that a machine that slows down or speeds up favours neither.

    Args:
        batch: The number of requests that are handed to the engine at a time.
        k: The draft length; None lets the controller choose, and counts the time in which it is still learning. The
            engine is left with this setting.
        repeats: The number of generations of each kind.
    """
    runs: dict[int | None, list[list[Generation]]] = {0: [], k: []}
    for repeat in range(repeats):
        for length in (0, k) if repeat % 2 == 0 else (k, 0):
            engine.set_k(length)
            engine.reset_prefix_cache()
            runs[length].append([engine.generate(requests[i : i + batch]) for i in range(0, len(requests), batch)])
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
        tokens_equal=_share_equal(runs[0][0], runs[k][0]),
    )


def _rate(run: list[Generation]) -> float:
    return sum(part.num_tokens for part in run) / sum(part.seconds for part in run)


def _decode_steps(run: list[Generation]) -> int:
    return sum(part.stats.decode_steps for part in run)


def _share_equal(left: list[Generation], right: list[Generation]) -> float:
    pairs = [
        (a.tokens, b.tokens)
        for x, y in zip(left, right, strict=True)
        for a, b in zip(x.responses, y.responses, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)
