"""What is asked of the engine, and what it answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from specrl.rollout.drafts.acceptance import SourceCounts, SpeculationStats

MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this, except 0."""


@dataclass(frozen=True)
class Request:
    """One response to sample. What the sampler cannot honour exactly (min_p, logit_bias, ...) cannot be asked for."""

    prompt_tokens: list[int]
    seed: int
    """In [0, 2^63); with the position it decides the random number of each token."""
    max_tokens: int
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is all tokens."""

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            raise ValueError("a request needs at least one prompt token")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed} is outside [0, 2^63)")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens = {self.max_tokens} must be at least 1")
        if self.temperature != 0 and self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature = {self.temperature} must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"top_p = {self.top_p} must be in (0, 1] and top_k = {self.top_k} not negative")


@dataclass(frozen=True)
class Response:
    """Tokens include the stop token, text does not; log-probs are under the distribution sampled from."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    """`stop` at an end token, `length` at max_tokens or the context's end, `abort` where the caller stopped it."""
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    started_at: float
    """Unix seconds, end of the first iteration that worked on its prompt."""
    finished_at: float
    """Unix seconds."""
    by_source: Mapping[str, SourceCounts] = field(default_factory=dict)
    """The same counters per source of drafts."""


@dataclass(frozen=True)
class Generation:
    responses: list[Response]
    """In the order of the requests."""
    stats: SpeculationStats
    seconds: float
    num_tokens: int


def response_seed(run_seed: int, step: int, prompt_id: int, sample: int) -> int:
    """Seed of one response, 63 bit: a pure function, so that a step can be replayed."""
    words = b"".join(value.to_bytes(8, "little") for value in (run_seed, step, prompt_id, sample))
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
