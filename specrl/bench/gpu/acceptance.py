"""Synthetic acceptance, for benchmarks of a model without a trained drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specrl.rollout.sampling.verification import Verified


class SyntheticAcceptance:
    """A context in which drafts are accepted at random: all work is done as ever, and the text is not the policy's."""

    def __init__(self, sampler: Any, acceptance_length: float, k: int, vocab_size: int) -> None:
        """The mean acceptance length is for drafts of up to `k` tokens, bonus token included."""
        self._sampler, self._sampling, self._vocab_size = sampler, sampler.sampling, vocab_size
        self._rate = rate_for(acceptance_length, k)
        self._generator = torch.Generator(sampler.longest.gpu.device).manual_seed(0)

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


def rate_for(acceptance_length: float, k: int) -> float:
    """The rate r at which each next token is accepted, so that 1 + r + r^2 + ... + r^k is the length."""
    if not 1 <= acceptance_length <= k + 1:
        raise ValueError(f"an acceptance length of {acceptance_length} is not in [1, {k + 1}], with k = {k}")
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**power for power in range(k + 1)) < acceptance_length else (low, rate)
    return (low + high) / 2
