"""Requests to the engine, and its responses."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from specrl.config.rollout import MAX_TEMPERATURE, MIN_TEMPERATURE
from specrl.rollout.drafts.acceptance import SpeculationStats, VerifiedDraft


@dataclass(frozen=True)
class Request:
    """A request for one response; settings that the sampler cannot honour exactly, such as min_p, are left out."""

    prompt_tokens: list[int]
    seed: int
    """A number in [0, 2^63); with the position it determines the noise of each token."""
    max_tokens: int
    temperature: float
    """The temperature, 0 for greedy decoding, otherwise from `MIN_TEMPERATURE` to `MAX_TEMPERATURE`."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    stop: tuple[str, ...] = ()
    """The strings that end the response, as in `sampling.stop`."""

    def __post_init__(self) -> None:
        # Users' input is checked where configuration and command line are read.
        assert self.prompt_tokens, "prompt_tokens are missing"
        assert 0 <= self.seed < 2**63 and self.max_tokens >= 1, f"seed = {self.seed}, max_tokens = {self.max_tokens}"
        is_sampled = MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE
        assert self.temperature == 0 or is_sampled, f"temperature = {self.temperature}"
        assert 0 < self.top_p <= 1 and self.top_k >= 0, f"top_p = {self.top_p}, top_k = {self.top_k}"


@dataclass(frozen=True)
class Response:
    """A response. Its tokens include the stop token, or the token that completes a stop string.

    Its text ends with that string, and omits special tokens.
    """

    tokens: list[int]
    logprobs: list[float]
    """The log-prob of each token, in nats, under the distribution it was sampled from; 0 for greedy decoding."""
    log_kept_mass: list[float] | None
    """The log of the probability mass kept by top-k and top-p at each token, see `Picked`; None if neither can drop
    tokens."""
    text: str
    finish_reason: str
    """`stop` after a stop token or string, `length` at max_tokens or `model.max_length`, else `abort`."""
    started_at: float
    """When its first token arrived, in Unix seconds."""
    finished_at: float
    """When its last token arrived, in Unix seconds."""
    drafts: Sequence[VerifiedDraft] = field(default=(), repr=False)
    routes: NDArray[Any] | None = field(default=None, repr=False)
    """The experts of each token of prompt and response but the last, [tokens - 1, layers, experts per token]; None
    if they were not requested, or the policy has none."""
    turns: Sequence[int] = ()
    """For a conversation, as `Rollout.turns`; `logprobs` and `log_kept_mass` then cover the sampled tokens only."""

    @property
    def stats(self) -> SpeculationStats:
        """The counters of its drafts, without `decode_steps`."""
        return SpeculationStats.of(self.drafts)


@dataclass(frozen=True)
class Generation:
    """The responses to a list of requests, in their order."""

    responses: list[Response]
    stats: SpeculationStats
    seconds: float
    num_tokens: int
    """Of all responses together."""


def response_seed(run_seed: int, step: int, prompt_id: int, sample: int, turn: int = 0) -> int:
    """The 63-bit seed of one response, or of a later turn of a conversation: a pure function of the arguments, so that
    a step can be repeated."""
    values = (run_seed, step, prompt_id, sample, *((turn,) if turn else ()))
    words = b"".join(value.to_bytes(8, "little") for value in values)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
