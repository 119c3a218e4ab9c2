"""What to do about tokens that one numerical engine sampled and another trains on: weights of their policy gradient.

With r = p_trainer / p_engine of a sampled token, all detached:

- `tis`, truncated importance sampling, min(r, cap): Yao et al. 2025, "Your efficient RL framework secretly brings you
  off-policy RL training".
- `icepop`, r where it lies in a range and 0 elsewhere, so that tokens on which the engines disagree are not trained on:
  Ling team 2025, "Every step evolves: scaling reinforcement learning for trillion-scale thinking model"
  (arXiv:2510.18855).
- `seq-mask`, as `tis`, and 0 for whole responses in which any r, or the geometric mean of r, is outside a range: Liu,
  Li et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".

What is masked still counts in the number of tokens that the loss is divided by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specrl.config import TrainConfig


def importance_weights(
    logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """Weights of the tokens, and which of them the correction has truncated or masked; [batch, seq] each.

    Args:
        logprobs: under the trainer's policy that stands for the sampling one, [batch, seq].
        mask: bool, True at response tokens; one row is one response.
    """
    log_ratio = ((logprobs - generation_logprobs) * mask).detach()
    ratio = log_ratio.exp()
    if config.importance_correction == "none":
        return torch.ones_like(ratio), torch.zeros_like(mask)
    if config.importance_correction == "icepop":
        outside = _outside(ratio, config.importance_range) & mask
        return ratio.masked_fill(outside, 0.0), outside
    truncated = (ratio > config.importance_cap) & mask
    weights = ratio.clamp(max=config.importance_cap)
    if config.importance_correction == "tis":
        return weights, truncated
    dropped = mask & _dropped(log_ratio, mask, config)[:, None]
    return weights.masked_fill(dropped, 0.0), truncated | dropped


def _dropped(log_ratio: Tensor, mask: Tensor, config: TrainConfig) -> Tensor:
    """[batch] bool: responses that `seq-mask` leaves out."""
    if config.sequence_mask == "any":
        return (_outside(log_ratio.exp(), config.importance_range) & mask).any(1)
    mean = log_ratio.sum(1) / mask.sum(1).clamp(min=1)
    return _outside(mean.exp(), config.importance_range)


def _outside(ratio: Tensor, allowed: tuple[float, float]) -> Tensor:
    """True also where it is not a number."""
    low, high = allowed
    return ~((ratio >= low) & (ratio <= high))
