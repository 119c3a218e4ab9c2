"""The start-up test of the sampler inside an engine: it gets crafted logits and drafts, and every token is checked.

An engine starts only after every token that the installed sampler gives has been compared with a reference
(`sampling.self_test`): plain rows, accepted and rejected drafts, greedy decoding, top-k, top-p and temperatures, mixed
in one batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specrl.rollout.requests import Request, Response
from specrl.rollout.sampling.inverse_cdf import Picked
from specrl.rollout.sampling.self_test import (
    ELSEWHERE,
    SUPPORT,
    SamplerError,
    check_logprobs,
    crafted_logits,
    crafted_requests,
    right_picks,
)
from specrl.rollout.sampling.verification import Verified


class CraftedInputs:
    """A context manager that gives an engine's sampler crafted inputs, and then checks the responses."""

    def __init__(self, sampler: Any, vocab_size: int, stop_tokens: list[int]) -> None:
        self._sampler, self._sampling = sampler, sampler.sampling
        self.support = [token for token in range(vocab_size) if token not in stop_tokens][:SUPPORT]
        self.num_accepted = 0
        self.num_rejected = 0
        if len(self.support) < SUPPORT:
            raise ValueError(f"a vocabulary of {vocab_size} tokens is too small for the sampler's self-test")

    def requests(self) -> list[Request]:
        """The requests of the test."""
        return crafted_requests(self.support)

    def every_pair(self) -> list[int]:
        """Text with every pair of tokens of the support, so that something in it agrees with any response."""
        return [token for first in self.support for second in self.support for token in (first, second)]

    def __enter__(self) -> CraftedInputs:
        self._sampler.pick = self._pick
        self._sampler.sampling = self._sampling._replace(verify=self._verify)
        return self

    def __exit__(self, *_: object) -> None:
        del self._sampler.pick
        self._sampler.sampling = self._sampling

    def _pick(self, logits: Tensor, requests: Tensor, positions: Tensor) -> Picked:
        """Pick from crafted logits, and craft the drafts that come to the rows."""
        states = self._sampler.sampling_states
        settings = (states.seeds, states.temperature, states.top_k, states.top_p)
        rows = zip(positions.tolist(), *(values.gpu[requests].tolist() for values in settings), strict=True)
        crafted, drafts = torch.full_like(logits, ELSEWHERE), []
        for row, (position, seed, temperature, top_k, top_p) in enumerate(rows):
            crafted[row, self.support] = torch.tensor(crafted_logits(position + 1)).to(logits)
            limit = top_k if top_k < logits.shape[1] else 0  # vLLM writes "all" so
            right = self._right(seed, position + 1, temperature, limit, top_p)
            drafts.append(right[0] if is_right(position + 1) else self._wrong(right))
        self._drafts = torch.tensor([0, *drafts[:-1]], device=logits.device)
        picked: Picked = type(self._sampler).pick(self._sampler, crafted, requests, positions)
        return picked

    def _verify(self, picked: Tensor, drafts: Tensor, *others: Any) -> Verified:
        verified: Verified = self._sampling.verify(picked, self._drafts.to(drafts.dtype), *others)
        return verified

    def _right(self, seed: int, position: int, temperature: float, top_k: int, top_p: float) -> list[int]:
        return sorted(self.support[pick] for pick in right_picks(seed, position, temperature, top_k, top_p))

    def _wrong(self, right: list[int]) -> int:
        return next(token for token in self.support if token not in right)

    def check(self, case: Request, response: Response) -> None:
        """Check a response: its tokens, its log-probs, the mass that truncation kept, and what it says of its drafts.

        Raises:
            SamplerError: Something is not what the reference says.
        """
        start, settings = len(case.prompt_tokens), (case.temperature, case.top_k, case.top_p)
        for position, token in enumerate(response.tokens, start):
            right = self._right(case.seed, position, *settings)
            if token not in right:
                raise SamplerError(
                    f"the sampler installed in the engine gave token {token} where one of {right} was right: not "
                    "starting; is another patch of vLLM active?"
                )
        if len(response.tokens) != case.max_tokens:
            raise SamplerError(f"a response has {len(response.tokens)} tokens instead of {case.max_tokens}")
        picks = [self.support.index(token) for token in response.tokens]
        check_logprobs(case, picks, response.logprobs, response.log_kept_mass)
        for _, context, drafted, accepted, _ in response.drafts:
            right_ones = [is_right(context + place) for place in range(drafted)]
            if accepted != [*right_ones, False].index(False):
                raise SamplerError(f"the sampler accepted {accepted} of the drafted tokens {right_ones} (right or not)")
            self.num_accepted += accepted
            self.num_rejected += drafted - accepted

    def check_drafts(self, *, speculates: bool) -> None:
        """Raise SamplerError if there were no drafts to accept and to reject, in an engine that speculates."""
        if speculates and (not self.num_accepted or not self.num_rejected):
            raise SamplerError(
                "the self-test saw no accepted or no rejected draft, so it proves nothing about speculation"
            )


def is_right(position: int) -> bool:
    """Whether the crafted draft for a position is right: at two of three they are."""
    return position % 3 != 0
