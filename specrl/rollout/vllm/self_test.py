"""The start-up test of the sampler inside an engine: it gets crafted logits and drafts, and every token is checked.

vLLM 0.32.0's own CPU sampler verifies drafts with uninitialised memory, without any error. So an engine starts only
after every token that the installed sampler gives has been compared with a reference (`sampling.self_test`): plain
rows, accepted and rejected drafts, greedy decoding, top-k, top-p and temperatures, mixed in one batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.sampling.self_test import (
    ELSEWHERE,
    SUPPORT,
    CraftedRequest,
    SamplerError,
    check_logprobs,
    crafted_logits,
    crafted_requests,
    right_picks,
)
from specrl.rollout.vllm.sampler import request_seed


class CraftedInputs:
    """A context manager that gives the sampler installed in `runner` crafted inputs and checks what it returns."""

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
        """Return the requests of the test."""
        return crafted_requests(self.support)

    def every_pair(self) -> list[int]:
        """Return text with every pair of tokens of the support, so that something in it agrees with any response."""
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
                crafted[len(expected), self.support] = torch.tensor(crafted_logits(state.num_tokens + offset)).to(
                    logits
                )
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
        """Return the tokens that may be picked at a position."""
        seed = request_seed(params)
        picks = right_picks(seed, position, params.temperature, max(params.top_k, 0), params.top_p)
        return sorted(self.support[pick] for pick in picks)

    def _draft(self, right: list[int], position: int) -> int:
        """Return a right token at two of three positions, and a wrong one at the third."""
        return right[0] if position % 3 else next(token for token in self.support if token not in right)

    def check_logprobs(
        self, request: CraftedRequest, tokens: list[int], logprobs: list[float], log_kept_mass: list[float] | None
    ) -> None:
        """Raise SamplerError if a log-prob of a response, or the mass that truncation kept, is not its token's."""
        check_logprobs(request, [self.support.index(token) for token in tokens], logprobs, log_kept_mass)

    def check_counters(self, stats: SpeculationStats, *, speculates: bool) -> None:
        """Raise SamplerError if the counters are wrong, or drafts were not both accepted and rejected."""
        counted = (stats.num_accepted_tokens, stats.num_draft_tokens - stats.num_accepted_tokens)
        if counted != (self.num_accepted, self.num_rejected):
            raise SamplerError(
                f"the sampler counted {counted[0]} accepted and {counted[1]} rejected draft tokens, but there were "
                f"{self.num_accepted} and {self.num_rejected}"
            )
        if speculates and (not self.num_accepted or not self.num_rejected):
            raise SamplerError(
                "the self-test saw no accepted or no rejected draft, so it proves nothing about speculation"
            )
