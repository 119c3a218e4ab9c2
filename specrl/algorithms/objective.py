"""What a policy update minimises: the chosen loss, weighted by the chosen correction, and a KL penalty."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specrl.algorithms.losses import LossInputs
from specrl.config import TrainConfig
from specrl.config.algorithms import CORRECTIONS, LOSSES


@dataclass(frozen=True)
class TokenTargets:
    """What the objective knows of each token beside the policy's log-prob; all [batch, seq], zero outside the mask."""

    advantages: Tensor
    generation_logprobs: Tensor
    """Log-probs under the engine, when the tokens were sampled."""
    old_logprobs: Tensor | None
    """Log-probs under the trainer's policy before this batch; none when the batch is used for one update only."""
    reference_logprobs: Tensor | None
    """Log-probs under the reference policy; none without a KL penalty."""


def policy_loss(
    logprobs: Tensor, entropy: Tensor, mask: Tensor, targets: TokenTargets, config: TrainConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the objective of one micro-batch, summed over its tokens; the caller divides by their number.

    Per token: w * loss + kl_coef * k3, with w the correction's weight and k3 = exp(ref - lp) - (ref - lp) - 1
    (Schulman 2020) the estimator of KL(policy | reference).

    Args:
        logprobs: [batch, seq] float32 under the policy being trained; carries the gradient.
        entropy: [batch, seq] float32, nats, detached.
        mask: [batch, seq] bool, True at response tokens.

    Returns:
        The objective and the metrics `entropy`, `kl`, `corrected_fraction` and the loss's own, each summed over the
        mask's tokens.

    Raises:
        ValueError: The loss returns a metric with one of these names.
    """
    old = logprobs.detach() if targets.old_logprobs is None else targets.old_logprobs
    loss, metrics = LOSSES.function(config.loss)(LossInputs(logprobs, old, targets.advantages, mask))
    log_ratio = ((old - targets.generation_logprobs) * mask).detach()
    weights, corrected = CORRECTIONS.function(config.correction)(log_ratio, mask)
    per_token = weights * loss
    shared = {"entropy": entropy, "corrected_fraction": corrected, "kl": logprobs.new_zeros(logprobs.shape)}
    if targets.reference_logprobs is not None:
        log_ratio = targets.reference_logprobs - logprobs
        shared["kl"] = log_ratio.exp() - log_ratio - 1
        per_token = per_token + config.kl_coef * shared["kl"]
    if taken := metrics.keys() & shared.keys():
        raise ValueError(f"train.loss = {config.loss.name!r} returns metrics that every loss has: {sorted(taken)}")
    sums = {name: (values.detach() * mask).sum().float() for name, values in (metrics | shared).items()}
    return (per_token * mask).sum(), sums
