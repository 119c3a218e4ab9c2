"""Start-up test of whatever samples inside the engine: crafted logits and drafts in, against a reference of its own.

vLLM 0.32.0's own CPU sampler verifies drafts with uninitialised memory, and nothing tells. So an engine does not start
before every token its installed sampler gives has been compared: plain rows, accepted and rejected drafts, greedy,
top-k, top-p and temperatures mixed in one batch. The reference shares no code with `sampling`: Python integers, FP64,
whole sorts and cumulative sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.vllm.sampler import request_seed

NUM_TOKENS = 20
"""Tokens generated per request."""
PERIOD = 3
"""Crafted logits repeat along positions, so that n-gram drafting finds something to propose."""
SUPPORT = 16
"""Tokens with crafted logits; all others are impossible but for rounding."""
ELSEWHERE = -40.0
NEAR_TIE = 1e-6
"""In CDF units: FP32 softmax against FP64."""
LOGPROB_TOLERANCE = 1e-3
SETTINGS = ((1.0, 0, 1.0), (0.7, 0, 0.9), (1.0, 5, 1.0), (0.0, 0, 1.0), (1.3, 8, 0.8), (0.5, 0, 1.0))
"""(temperature, top_k, top_p) of each request."""


class SamplerError(RuntimeError):
    """What samples inside the engine is not the drafter-invariant sampler; its rollouts would not be the policy's."""


@dataclass(frozen=True)
class CraftedRequest:
    prompt_tokens: list[int]
    seed: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float


class CraftedInputs:
    """Stands before the sampler installed in `runner` and judges what it returns. Use as a context manager."""

    def __init__(self, runner: Any, vocab_size: int, stop_tokens: list[int]) -> None:
        self.runner = runner
        self.installed = runner._sample
        self.support = [token for token in range(vocab_size) if token not in stop_tokens][:SUPPORT]
        self.vocab_size = vocab_size
        self.num_accepted = 0
        self.num_rejected = 0
        if len(self.support) < SUPPORT:
            raise ValueError(f"a vocabulary of {vocab_size} tokens is too small for the sampler's self-test")

    def requests(self) -> list[CraftedRequest]:
        return [
            CraftedRequest(self.support[: 3 + index] * 2, 2**40 + 2**33 * index, NUM_TOKENS, *settings)
            for index, settings in enumerate(SETTINGS)
        ]

    def every_pair(self) -> list[int]:
        """Text in which every two tokens of the support follow each other: any response is found again in it."""
        return [token for first in self.support for second in self.support for token in (first, second)]

    def __enter__(self) -> CraftedInputs:
        self.runner._sample = self
        return self

    def __exit__(self, *_: object) -> None:
        self.runner._sample = self.installed

    def __call__(self, logits: Tensor, metadata: Any) -> Any:
        ids = self.runner.input_batch.req_ids
        counts = [0] * len(ids) if metadata is None else metadata.num_draft_tokens
        states = [self.runner.requests[request_id] for request_id in ids]
        expected: list[list[int]] = []
        drafts: list[int] = []
        crafted = torch.full_like(logits, ELSEWHERE)
        for state, count in zip(states, counts, strict=True):
            for offset in range(count + 1):
                crafted[len(expected), self.support] = torch.tensor(_values(state.num_tokens + offset)).to(logits)
                expected.append(self._expected(state.sampling_params, state.num_tokens + offset))
                if offset < count:
                    drafts.append(self._draft(expected[-1], state.num_tokens + offset))
        if metadata is not None:
            metadata.draft_token_ids.copy_(torch.tensor(drafts))
        output = self.installed(crafted, metadata)
        self._judge(output.sampled_token_ids.tolist(), counts, expected, drafts)
        return output

    def _judge(self, sampled: list[list[int]], counts: list[int], expected: list[list[int]], drafts: list[int]) -> None:
        first = first_draft = 0
        discarded = self.runner.discard_request_mask.np
        for index, (row, count) in enumerate(zip(sampled, counts, strict=True)):
            wanted = expected[first : first + count + 1]
            proposed = drafts[first_draft : first_draft + count]
            first, first_draft = first + count + 1, first_draft + count
            if discarded[index]:
                continue
            accepted = 0
            while accepted < count and proposed[accepted] == row[accepted]:
                accepted += 1
            given = [token for token in row if token != -1]
            right = len(given) == accepted + 1 and row[: len(given)] == given
            if not right or any(token not in options for token, options in zip(given, wanted, strict=False)):
                raise SamplerError(
                    f"the sampler installed in the engine gave {given} for drafts {proposed} where one of {wanted} was "
                    "right: not starting; is another patch of vLLM active?"
                )
            self.num_accepted += accepted
            self.num_rejected += count - accepted

    def _expected(self, params: Any, position: int) -> list[int]:
        """Tokens that may be picked: one, or the two beside a near-tie."""
        kept, cdf, _ = reference_distribution(position, params.temperature, max(params.top_k, 0), params.top_p)
        u = reference_uniform(request_seed(params), position)
        around = [int(np.searchsorted(cdf, value, side="right")) for value in (u - NEAR_TIE, u, u + NEAR_TIE)]
        return sorted({self.support[kept[min(index, len(kept) - 1)]] for index in around})

    def _draft(self, right: list[int], position: int) -> int:
        """The right token two times of three, else a wrong one."""
        return right[0] if position % 3 else next(token for token in self.support if token not in right)

    def check_logprobs(self, request: CraftedRequest, tokens: list[int], logprobs: list[float]) -> None:
        for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            position = len(request.prompt_tokens) + index
            kept, _, probs = reference_distribution(position, request.temperature, request.top_k, request.top_p)
            wanted = math.log(probs[list(kept).index(self.support.index(token))])
            if not abs(logprob - wanted) <= LOGPROB_TOLERANCE:
                raise SamplerError(f"the sampler's log-prob of token {token} is {logprob}; {wanted} was right")

    def check_counters(self, stats: SpeculationStats, *, speculates: bool) -> None:
        counted = (stats.num_accepted_tokens, stats.num_draft_tokens - stats.num_accepted_tokens)
        if counted != (self.num_accepted, self.num_rejected):
            raise SamplerError(
                f"counters say {counted} drafts accepted and rejected, not {self.num_accepted, self.num_rejected}"
            )
        if speculates and (not self.num_accepted or not self.num_rejected):
            raise SamplerError(
                "the self-test saw no accepted or no rejected draft, so it proves nothing about speculation"
            )


def _values(position: int) -> list[float]:
    """Crafted logits [SUPPORT] at a position: eighths, which BF16 represents exactly."""
    return [((37 * token + 61 * (position % PERIOD) + 11 * token * token) % 48) / 8 for token in range(SUPPORT)]


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
    """Indices into the support that are kept, ascending, with their CDF and probabilities, FP64."""
    values = np.array(_values(position))
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
