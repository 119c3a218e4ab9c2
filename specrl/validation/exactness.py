"""Exactness on the real policy: speculative responses equal plain ones, token for token, sampled and greedy."""

from __future__ import annotations

from dataclasses import replace

from specrl.artifacts import ExactnessResult, ParityCounts
from specrl.precision.near_ties import Comparison, Trace, compare, limit_of, measure_noise, rounding_of
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine, Request, StoredText
from specrl.rollout.sampling.recorder import Recorder

SMALL_BATCH, NOISE_REQUESTS = 4, 8  # batch size and requests for measuring the noise of plain decoding


class ExactnessError(RuntimeError):
    """Speculation changed what is sampled; the rollouts are not the policy's."""


def exactness_metrics(found: ExactnessResult) -> dict[str, float]:
    """The results of a comparison under their names in MLflow."""
    per_1000 = [1000 * way.num_differences / max(1, way.num_tokens) for way in (found.sampled, found.greedy)]
    return {
        "validate/differences_per_1000_tokens": per_1000[0],
        "validate/greedy_differences_per_1000_tokens": per_1000[1],
        "validate/unexplained_differences": float(found.sampled.num_unexplained + found.greedy.num_unexplained),
        "validate/lead_noise": found.sampled.lead_noise,
        "validate/exactness_accepted_tokens": float(found.num_accepted_tokens),
    }


def check(found: ExactnessResult) -> None:
    """Raise ExactnessError if near-ties do not explain all differences, naming the value and its limit."""
    for name, way in (("sampled", found.sampled), ("greedy", found.greedy)):
        if way.num_unexplained:
            raise ExactnessError(
                f"speculation changed {name} responses: near-ties do not explain {way.num_unexplained} tokens; their "
                f"limit is {way.limit:.1e} nats"
            )


def measure_exactness(engine: Engine, requests: list[Request], k: int) -> ExactnessResult:
    """Compare speculative generation, with drafts of up to `k` tokens, with plain generation.

    The noise of plain decoding is measured only if tokens differ, since it is only needed to explain differences.
    """
    requests = [replace(request, top_p=1.0, top_k=0) for request in requests]  # see `near_ties`
    ways = requests, [replace(request, temperature=0.0) for request in requests]
    plain = [traces(engine, way, len(way), 0) for way in ways]
    if engine.replays:
        engine.set_replay(texts_to_replay(requests, plain[0]))
    speculative, drafts = zip(*(recorded(engine, way, len(way), k) for way in ways), strict=True)
    if engine.replays:
        engine.set_replay([])
    noise = 0.0
    if any(compare(*pair, noise).divergences for pair in zip(plain, speculative, strict=True)):
        noise = noise_of_shapes(engine, requests, plain[0], k)
    sampled, greedy = (compare(*pair, noise) for pair in zip(plain, speculative, strict=True))
    return exactness_of(sampled, greedy, noise, SpeculationStats.merge(drafts))


def exactness_of(sampled: Comparison, greedy: Comparison, noise: float, drafts: SpeculationStats) -> ExactnessResult:
    """Sum up two comparisons, which are conclusive only if some drafts were accepted and some rejected."""
    return ExactnessResult(
        num_draft_tokens=drafts.num_draft_tokens,
        num_accepted_tokens=drafts.num_accepted_tokens,
        sampled=_counts(sampled, noise),
        greedy=_counts(greedy, noise),
    )


def _counts(found: Comparison, noise: float) -> ParityCounts:
    return ParityCounts(
        num_responses=found.num_responses,
        num_tokens=found.num_tokens,
        num_differences=len(found.divergences),
        num_unexplained=found.num_unexplained,
        lead_noise=noise,
        limit=limit_of(noise),
        largest_distance=max((item.distance for item in found.divergences), default=0.0),
    )


def noise_of_shapes(engine: Engine, requests: list[Request], plain: list[Trace], k: int) -> float:
    """Measure how far `plain` decoding differs between batch sizes, up to as many rows as in verification, and from
    passes over the same text."""
    few = requests[:NOISE_REQUESTS]
    small = measure_noise(plain[: len(few)], traces(engine, few, min(SMALL_BATCH, max(1, len(few) // 2)), 0))
    rows = min(len(requests) * (k + 1), engine.config.engine.max_num_seqs)
    others = [
        replace(requests[i % len(requests)], seed=(requests[i % len(requests)].seed + 1 + i) % 2**63)
        for i in range(max(0, rows - len(few)))
    ]
    large = measure_noise(plain[: len(few)], traces(engine, [*few, *others], rows, 0)[: len(few)])
    noise = max(small, large, rounding_of(engine.config.model.dtype))
    if engine.replays:
        pairs = zip(few, plain, strict=False)
        engine.set_replay([StoredText(asked.prompt_tokens, _tokens(trace), asked.seed) for asked, trace in pairs])
        noise = max(noise, measure_noise(plain[: len(few)], traces(engine, few, len(few), k)))
        engine.set_replay([])
    return noise


def texts_to_replay(requests: list[Request], plain: list[Trace]) -> list[StoredText]:
    """Turn the results of plain decoding into text to replay, with one wrong token in every second text.

    Half of the texts have known seeds, so that they are read ahead.
    """
    texts = []
    for index, (request, trace) in enumerate(zip(requests, plain, strict=True)):
        text = _tokens(trace)
        if index % 2:
            text[len(text) // 2] = text[0]
        texts.append(StoredText(request.prompt_tokens, text, request.seed if index % 4 < 2 else None))
    return texts


def _tokens(trace: Trace) -> list[int]:
    return [trace[position].token for position in sorted(trace)]


def traces(engine: Engine, requests: list[Request], batch: int, k: int) -> list[Trace]:
    """Answer requests, `batch` at a time with drafts of up to `k` tokens, and record the picks of each."""
    return recorded(engine, requests, batch, k)[0]


def recorded(engine: Engine, requests: list[Request], batch: int, k: int) -> tuple[list[Trace], SpeculationStats]:
    engine.reset_prefix_cache()
    engine.set_k(k)
    with Recorder(engine.sampler) as recorder:
        parts = [engine.generate(requests[i : i + batch]) for i in range(0, len(requests), batch)]
    responses = [response for part in parts for response in part.responses]
    found: list[Trace] = []
    for request, response in zip(requests, responses, strict=True):
        first, picks = len(request.prompt_tokens), recorder.traces[request.seed]
        found.append({position: picks[position] for position in range(first, first + len(response.tokens))})
    return found, SpeculationStats.merge(part.stats for part in parts)
