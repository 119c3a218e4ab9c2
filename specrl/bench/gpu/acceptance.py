"""Synthetic acceptance, for benchmarks of a model without a trained drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specrl.rollout.sampling.verification import Sampling, Verified

K = 3
RATES = {2.0: 0.5437, 2.5: 0.6914, 3.0: 0.8105}
"""Acceptance lengths, and the rate r of each token at which 1 + r + r^2 + ... + r^K is that length."""


def accepting_at(rate: float, sampler: Any, vocab_size: int) -> Sampling:
    """How a sampler verifies where the next token of a draft is accepted at this rate.

    All work is done as ever, but for its being pretended that the policy has picked the beginning of every draft, at
    random: the text is not the policy's.
    """
    generator = torch.Generator(sampler.stop_tokens.gpu.device).manual_seed(0)
    real: Sampling = sampler.sampling

    def verify(picked: Tensor, drafts: Tensor, *others: Any) -> Verified:
        is_right = torch.rand(len(picked), device=picked.device, generator=generator) < rate
        following = drafts.roll(-1)  # behind a request's last row, whose token no draft decides
        return real.verify(torch.where(is_right, following, (following + 1) % vocab_size), drafts, *others)

    return real._replace(verify=verify)
