"""Synthetic acceptance, for benchmarks of a model without a trained drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specrl.rollout.sampling.verification import Verified

K = 3
RATES = {2.0: 0.5437, 2.5: 0.6914, 3.0: 0.8105}
"""Acceptance lengths, and the rate r of each token at which 1 + r + r^2 + ... + r^K is that length."""


class SyntheticAcceptance:
    """A context in which drafts are accepted at random: all work is done as ever, and the text is not the policy's."""

    def __init__(self, sampler: Any, rate: float, vocab_size: int) -> None:
        """Each next token of a draft is accepted at this rate; entered again, it goes on with other random numbers."""
        self._sampler, self._sampling, self._vocab_size, self._rate = sampler, sampler.sampling, vocab_size, rate
        self._generator = torch.Generator(sampler.stop_tokens.gpu.device).manual_seed(0)

    def __enter__(self) -> SyntheticAcceptance:
        self._sampler.sampling = self._sampling._replace(verify=self._verify)
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.sampling = self._sampling

    def _verify(self, picked: Tensor, drafts: Tensor, *others: Any) -> Verified:
        """Pretend that the policy has picked the beginning of every draft, then verify as ever."""
        is_right = torch.rand(len(picked), device=picked.device, generator=self._generator) < self._rate
        following = drafts.roll(-1)  # behind a request's last row, whose token no draft decides
        pretended = torch.where(is_right, following, (following + 1) % self._vocab_size)
        verified: Verified = self._sampling.verify(pretended, drafts, *others)
        return verified
