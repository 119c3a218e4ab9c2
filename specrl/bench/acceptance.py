"""Synthetic acceptance, for models whose weights are random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specrl.rollout.sampling.verification import Sampling, Verified


def accepting_at(rate: float, sampler: Any, vocab_size: int) -> Sampling:
    """Make a sampler's verification accept each next token of a draft at this rate.

    All of the usual work is done, but a random prefix of every draft is treated as if the policy had picked it, so the
    text is not the policy's.
    """
    generator = torch.Generator(sampler.req_states.device).manual_seed(0)
    real: Sampling = sampler.sampling

    def verify(picked: Tensor, drafts: Tensor, *others: Any) -> Verified:
        is_right = torch.rand(len(picked), device=picked.device, generator=generator) < rate
        following = drafts.roll(-1)  # after a request's last row, whose token no draft decides
        return real.verify(torch.where(is_right, following, (following + 1) % vocab_size), drafts, *others)

    return real._replace(verify=verify)
