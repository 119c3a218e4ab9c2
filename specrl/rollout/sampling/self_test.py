"""The reference of the engine's start-up test: what a right sampler gives for crafted logits.

It shares no code with the sampler that it judges: Python integers, and FP64 sorts and cumulative sums over all tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specrl.rollout.requests import Request

NUM_TOKENS = 20
PERIOD = 3
"""The period of crafted logits along positions, so that n-gram drafting finds something to propose."""
SUPPORT, ELSEWHERE = 16, -40.0
"""The number of tokens with crafted logits, and the logit of the others."""
NEAR_TIE, LOGPROB_TOLERANCE = 1e-6, 1e-3
"""How far the FP32 CDF may be from the FP64 one, and a log-prob from the reference, in nats."""
SETTINGS = ((1.0, 0, 1.0), (0.7, 0, 0.9), (1.0, 5, 1.0), (0.0, 0, 1.0), (1.3, 8, 0.8), (0.5, 0, 1.0))
"""The temperature, top-k and top-p of each crafted request."""


class SamplerError(RuntimeError):
    """The engine does not sample as the drafter-invariant sampler does; its rollouts would not be the policy's."""


def crafted_requests(support: list[int]) -> list[Request]:
    """One request for each of `SETTINGS`, with prompts of tokens in the support."""
    return [
        Request(support[: 3 + index] * 2, 2**40 + 2**33 * index, NUM_TOKENS, temperature, top_p, top_k)
        for index, (temperature, top_k, top_p) in enumerate(SETTINGS)
    ]


def crafted_logits(position: int) -> list[float]:
    """The logits of the support at a position: multiples of 1/8, which BF16 represents exactly."""
    return [((37 * token + 61 * (position % PERIOD) + 11 * token * token) % 48) / 8 for token in range(SUPPORT)]


def right_picks(seed: int, position: int, temperature: float, top_k: int, top_p: float) -> list[int]:
    """The indices into the support that may be picked: one, or those on both sides of a near-tie."""
    kept, cdf, _ = reference_distribution(position, temperature, top_k, top_p)
    u = reference_uniform(seed, position)
    around = [int(np.searchsorted(cdf, value, side="right")) for value in (u - NEAR_TIE, u, u + NEAR_TIE)]
    return sorted({kept[min(index, len(kept) - 1)] for index in around})


def check_logprobs(
    request: Request, picks: list[int], logprobs: list[float], log_kept_mass: list[float] | None
) -> None:
    """Compare the log-probs and kept masses of a response with the reference.

    Args:
        picks: The tokens of the response, as indices into the support.
        log_kept_mass: None where nothing can be dropped.

    Raises:
        SamplerError: A value is off by more than `LOGPROB_TOLERANCE`.
    """
    masses = log_kept_mass if log_kept_mass is not None else [0.0] * len(picks)
    for index, (pick, logprob, mass) in enumerate(zip(picks, logprobs, masses, strict=True)):
        position = len(request.prompt_tokens) + index
        kept, _, probs = reference_distribution(position, request.temperature, request.top_k, request.top_p)
        right = math.log(probs[kept.index(pick)]), reference_log_kept_mass(position, request.temperature, kept)
        for name, given, wanted in zip(("log-prob", "log kept mass"), (logprob, mass), right, strict=True):
            if not abs(given - wanted) <= LOGPROB_TOLERANCE:
                raise SamplerError(f"the sampler gave token {index} of a response a {name} of {given}, not {wanted}")


def reference_uniform(seed: int, position: int) -> float:
    """u(seed, position) by Philox4x32-10, in Python integers."""
    low = 2**32 - 1
    c0, c1, c2, c3, k0, k1 = position & low, 0, 0, 0, seed & low, seed >> 32
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & low, (product0 >> 32) ^ c3 ^ k1, product0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return float((c1 << 32 | c0) >> 11) * 2.0**-53


def reference_distribution(
    position: int, temperature: float, top_k: int, top_p: float
) -> tuple[list[int], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The indices into the support that top-k and top-p keep, ascending, with their CDF and probabilities."""
    values = np.array(crafted_logits(position))
    if temperature == 0:
        return [int(values.argmax())], np.ones(1), np.ones(1)
    probs = np.exp((values - values.max()) / temperature)
    order = sorted(range(SUPPORT), key=lambda token: -probs[token])
    least = probs[order[top_k - 1]] if 0 < top_k < SUPPORT else 0.0
    order = [token for token in order if probs[token] >= least]
    mass = np.cumsum(probs[order])
    last = int(np.searchsorted(mass, top_p * mass[-1])) if top_p < 1 else len(order) - 1
    kept = [token for token in range(SUPPORT) if token in order and probs[token] >= probs[order[last]]]
    return kept, np.cumsum(probs[kept]) / probs[kept].sum(), probs[kept] / probs[kept].sum()


def reference_log_kept_mass(position: int, temperature: float, kept: list[int]) -> float:
    """The logarithm of the probability that the tokens `kept` have together; 0 for greedy decoding."""
    if temperature == 0:
        return 0.0
    values = np.array(crafted_logits(position))
    probs = np.exp((values - values.max()) / temperature)
    return math.log(probs[kept].sum() / probs.sum())
