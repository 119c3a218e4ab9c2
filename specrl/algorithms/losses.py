"""The policy's loss: token-level clipped policy gradient with clip-higher, importance correction and optional KL.

Pure functions of tensors; no engine, no model. All of them sum over tokens: the caller divides by the token count of
the global batch (DAPO, arXiv 2503.14476, equation 8), so that a long response weighs as much per token as a short one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specrl.algorithms.corrections import importance_weights
from specrl.config import TrainConfig


@dataclass(frozen=True)
class TokenTargets:
    """What the loss knows of each token beside the policy's log-prob; all [batch, seq], zero outside the mask."""

    advantages: Tensor
    generation_logprobs: Tensor
    """Under the engine, when it was sampled."""
    old_logprobs: Tensor | None
    """Under the trainer's policy before this batch; none when the batch is used for one update only."""
    reference_logprobs: Tensor | None
    """Under the reference policy; none without a KL penalty."""


def policy_loss(
    logprobs: Tensor, entropy: Tensor, mask: Tensor, targets: TokenTargets, config: TrainConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO on one micro-batch.

    Per token: -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k3, with r = p / p_old, w the
    importance weight and k3 = exp(ref - lp) - (ref - lp) - 1 (Schulman 2020) the estimator of KL(policy | reference).

    Args:
        logprobs: [batch, seq] float32 under the policy being trained; carries the gradient.
        entropy: [batch, seq] float32, nats, detached.
        mask: [batch, seq] bool, True at response tokens.

    Returns:
        The loss and the metrics `entropy`, `clip_fraction`, `kl`, `corrected_fraction`, each summed over the mask's
        tokens.
    """
    old = logprobs.detach() if targets.old_logprobs is None else targets.old_logprobs
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain = torch.minimum(ratio * targets.advantages, clipped * targets.advantages)
    weights, corrected = importance_weights(old, targets.generation_logprobs, mask, config)
    per_token = -weights * gain
    kl = torch.zeros_like(logprobs)
    if targets.reference_logprobs is not None:
        log_ratio = targets.reference_logprobs - logprobs
        kl = torch.exp(log_ratio) - log_ratio - 1
        per_token = per_token + config.kl_coef * kl
    is_clipped = (ratio * targets.advantages > clipped * targets.advantages).float()
    metrics = {
        "entropy": (entropy * mask).sum(),
        "clip_fraction": (is_clipped * mask).sum(),
        "kl": (kl.detach() * mask).sum(),
        "corrected_fraction": corrected.float().sum(),
    }
    return (per_token * mask).sum(), metrics
