"""The start-up test of the sampler inside an engine: it receives crafted logits and drafts, and every token is checked.

An engine starts only after every token of the installed sampler has been compared with `gumbel` on the CPU, row by row:
plain rows, accepted and rejected drafts, greedy decoding, top-k, top-p and temperatures, mixed in one batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specrl.rollout.errors import SamplerError
from specrl.rollout.requests import Request, Response
from specrl.rollout.sampling.gumbel import Picked, pick
from specrl.rollout.sampling.verification import Verified

NUM_TOKENS = 20
SUPPORT, ELSEWHERE = 16, -40.0
"""The number of tokens with crafted logits, and the logit of the others."""
LOGPROB_TOLERANCE = 1e-3
"""How far a log-prob or the log of a kept mass may be from the reference, in nats."""
SETTINGS = ((1.0, 0, 1.0), (0.7, 0, 0.9), (1.0, 5, 1.0), (0.0, 0, 1.0), (1.3, 8, 0.8), (0.5, 0, 1.0))
"""The temperature, top-k and top-p of each crafted request."""


class CraftedInputs:
    """A context manager that feeds crafted inputs to an engine's sampler, and then checks the responses."""

    def __init__(self, sampler: Any, vocab_size: int, stop_tokens: list[int]) -> None:
        self._sampler, self._sampling, self._vocab_size = sampler, sampler.sampling, vocab_size
        self.support = [token for token in range(vocab_size) if token not in stop_tokens][:SUPPORT]
        self.num_accepted = 0
        self.num_rejected = 0
        assert len(self.support) == SUPPORT, "a vocabulary that is too small for the sampler's self-test"

    def requests(self) -> list[Request]:
        """One request for each of `SETTINGS`, with prompts of tokens in the support."""
        return [
            Request(self.support[: 3 + index] * 2, 2**40 + 2**33 * index, NUM_TOKENS, temperature, top_p, top_k)
            for index, (temperature, top_k, top_p) in enumerate(SETTINGS)
        ]

    def __enter__(self) -> CraftedInputs:
        self._sampler.pick = self._pick
        self._sampler.sampling = self._sampling._replace(verify=self._verify)
        return self

    def __exit__(self, *_: object) -> None:
        del self._sampler.pick
        self._sampler.sampling = self._sampling

    def _pick(self, logits: Tensor, requests: Tensor, positions: Tensor) -> Picked:
        temperature, top_k, top_p, seeds = (values.cpu() for values in self._sampler.settings(requests))
        following = positions.cpu() + 1
        crafted = self._logits(following, logits.shape[1])
        right = pick(crafted, temperature, top_k, top_p, seeds, following).tokens
        first, second = self.support[:2]
        drafts = torch.where(is_right(following), right, torch.where(right == first, second, first))
        self._drafts = drafts.roll(1).to(logits.device)
        picked: Picked = type(self._sampler).pick(self._sampler, crafted.to(logits), requests, positions)
        return picked

    def _verify(self, picked: Tensor, drafts: Tensor, *others: Any) -> Verified:
        self._sampler.req_states.drafts.lengths.fill_(NUM_TOKENS)  # as if every row had a draft
        verified: Verified = self._sampling.verify(picked, self._drafts.to(drafts.dtype), *others)
        return verified

    def _logits(self, positions: Tensor, vocab: int) -> Tensor:
        # Multiples of 1/8, which BF16 represents exactly.
        token, phase = torch.arange(SUPPORT), (positions % 3)[:, None]
        logits = torch.full((len(positions), vocab), ELSEWHERE)
        logits[:, self.support] = ((37 * token + 61 * phase + 11 * token * token) % 48) / 8
        return logits

    def check(self, case: Request, response: Response) -> None:
        """Check a response's tokens, log-probs, mass kept by truncation, and draft outcomes."""
        positions = torch.arange(NUM_TOKENS) + len(case.prompt_tokens)
        settings = (case.temperature, case.top_k, case.top_p, case.seed)
        temperature, top_k, top_p, seeds = (torch.full((NUM_TOKENS,), value) for value in settings)
        right = pick(self._logits(positions, self._vocab_size), temperature, top_k, top_p, seeds, positions)
        if response.tokens != right.tokens.tolist():
            raise SamplerError(
                f"the sampler installed in the engine gave the tokens {response.tokens} where {right.tokens.tolist()} "
                "were right: not starting; is another patch of vLLM active?"
            )
        masses = response.log_kept_mass or [0.0] * NUM_TOKENS
        for found, wanted in ((response.logprobs, right.logprobs), (masses, right.log_kept_mass)):
            if not torch.allclose(torch.tensor(found), wanted, rtol=0, atol=LOGPROB_TOLERANCE):
                raise SamplerError(f"the sampler gave log-probs or logs of kept masses of {found}, not {wanted}")
        for context, drafted, accepted, _ in response.drafts:
            right_ones = [bool(is_right(context + place)) for place in range(drafted)]
            if accepted != [*right_ones, False].index(False):
                raise SamplerError(f"the sampler accepted {accepted} of the drafted tokens {right_ones} (right or not)")
            self.num_accepted += accepted
            self.num_rejected += drafted - accepted

    def check_drafts(self, *, speculates: bool) -> None:
        """Raise SamplerError if an engine that speculates had no drafts to accept or none to reject."""
        if speculates and (not self.num_accepted or not self.num_rejected):
            raise SamplerError(
                "the self-test saw no accepted or no rejected draft, so it proves nothing about speculation"
            )


def is_right(position: Any) -> Any:
    """Whether the crafted draft for a position, or for each of several, is right: at two of every three it is."""
    return position % 3 != 0
