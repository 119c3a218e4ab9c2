"""The objective of a policy update: the chosen loss, weighted by the correction, a KL penalty, and an entropy bonus.

A teacher is part of the advantages (on-policy distillation). With A = -c (log p_old - log p_teacher) at each token,
the expected gradient over the tokens that may be sampled there is that of c KL(p || p_teacher), the reverse KL, which
MiniLLM (arXiv 2306.08543) minimises over sequences and GKD (2306.13649) exactly at each token. A token's effect on
later ones does not count: this estimator with discount 0 is that of Thinking Machines' On-Policy Distillation (2025).
Both log-probs are the trainer's, so that a teacher equal to the policy teaches nothing, except for FP8 and replayed
experts, which only the policy has.

All log-probs here are of the whole distribution p at the sampling temperature, for every loss and correction. With
`sampling.top_p` or `top_k` the engine samples from q = p / Z instead, on the kept tokens, whose mass is Z. It returns
log q and log Z of every token, and the corrections compare their sum, the engine's log p.

- The ratio p_trainer / p_engine then reflects only numerics. The ratio p_trainer / q_engine contains a factor Z, which
  is below 1 wherever tokens are dropped. It would scale down the loss where the policy is unsure, and look like a
  mismatch.
- The trainer's own q is no alternative: rounding moves the edge of its nucleus, and a sampled token that falls outside
  has no log-prob. Keeping the engine's set of tokens, as DeepSeek-V3.2 does (arXiv:2512.02556), means storing it for
  every token.
- With the kept set held fixed, the gradients of log p and log q differ by that of log Z, times the advantage. At a
  position where advantages average 0 the difference is 0 in expectation: log Z does not depend on the sampled token.
  The rest raises the mass of the kept tokens in responses better than their group, and lowers it in worse ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specrl.algorithms.losses import LARGEST_LOG_RATIO, LossInputs
from specrl.config import TrainConfig
from specrl.config.algorithms import CORRECTIONS, LOSSES
from specrl.config.training import KlEstimator, LossMean


def response_weights(lengths: Sequence[int], mean: LossMean, most_tokens: int) -> list[float] | None:
    """The factors on each response's tokens that turn the mean over all tokens into `mean`; None if all are 1.

    Args:
        lengths: The tokens of each response of the step.
        most_tokens: `sampling.max_response_tokens`.
    """
    if mean == "token":
        return None
    average = sum(lengths) / max(1, len(lengths))
    return [average / (length if mean == "response" else most_tokens) if length else 0.0 for length in lengths]


def kl_estimates(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy || reference) estimated at each of the policy's tokens (Schulman 2020, "Approximating KL divergence").

    With l = log p - log p_reference, the mean of k1 = l and of k3 = exp(-l) - 1 + l is the divergence; k2 = l^2 / 2 is
    biased, but its gradient is the divergence's. The gradient of k1 is 0 on average.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    back = (-log_ratio).clamp(max=LARGEST_LOG_RATIO)
    return back.exp() - back - 1


@dataclass(frozen=True)
class TokenTargets:
    """The per-token data that the objective needs besides the policy's log-probs.

    All tensors are [batch, seq] and zero outside the mask; log-probs are in nats.
    """

    advantages: Tensor
    """The advantage of the response, at each of its tokens."""
    generation_logprobs: Tensor
    """Log-probs under the engine when the tokens were sampled, of the whole distribution like the trainer's."""
    old_logprobs: Tensor | None
    """Log-probs under the trainer's policy before the step's first update; None if a step has only one update."""
    reference_logprobs: Tensor | None
    """Log-probs under the reference policy; None without a KL penalty in the loss."""
    weights: Tensor | None = None
    """The factors of `response_weights`; None if all are 1."""
    teacher_logprobs: Tensor | None = None
    """Log-probs under `train.teacher`; None without one."""


def policy_loss(
    logprobs: Tensor, entropy: Tensor, mask: Tensor, targets: TokenTargets, config: TrainConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of one micro-batch, summed over its tokens; the caller divides by their number.

    The objective of a token is w * loss + kl_coef * kl - entropy_coefficient * H, where w is the correction's weight,
    kl is that of `kl_estimates` (with k3 the objective of GRPO, arXiv 2402.03300, equation 4), and H is the entropy of
    the policy's distribution at the token (as in A3C, arXiv 1602.01783, and PPO, arXiv 1707.06347, equation 9).

    Args:
        logprobs: [batch, seq] float32, under the policy being trained; it carries the gradient.
        entropy: [batch, seq] float32, in nats; it carries a gradient too.
        mask: [batch, seq] bool, True at response tokens.

    Returns:
        The objective and the metrics, which are `entropy`, `kl`, `corrected_fraction`, `teacher_kl` with a teacher, and
        the loss's own; each is summed over the tokens in the mask.
    """
    old = logprobs.detach() if targets.old_logprobs is None else targets.old_logprobs
    shared = {"entropy": entropy, "kl": logprobs.new_zeros(logprobs.shape)}
    advantages = targets.advantages
    if targets.teacher_logprobs is not None:
        shared["teacher_kl"] = old - targets.teacher_logprobs
        advantages = advantages - config.teacher_coef * shared["teacher_kl"]
    loss, metrics = LOSSES.function(config.loss)(LossInputs(logprobs, old, advantages, mask))
    log_ratio = ((old - targets.generation_logprobs) * mask).detach()
    weights, shared["corrected_fraction"] = CORRECTIONS.function(config.correction)(log_ratio, mask)
    per_token = weights * loss
    if targets.reference_logprobs is not None:
        shared["kl"] = kl_estimates(logprobs, targets.reference_logprobs, config.kl_estimator)
        per_token = per_token + config.kl_coef * shared["kl"]
    if config.entropy_coefficient:
        per_token = per_token - config.entropy_coefficient * entropy
    if targets.weights is not None:
        per_token = targets.weights * per_token
    if taken := metrics.keys() & shared.keys():
        names = ", ".join(sorted(taken))
        raise ValueError(f'train.loss = "{config.loss.name}" returns metrics that every loss already has: {names}')
    # Not a product with the mask: what a loss computes outside it, where log-probs are 0, may be no number.
    sums = {name: torch.where(mask, values.detach(), 0).sum().float() for name, values in (metrics | shared).items()}
    return torch.where(mask, per_token, 0).sum(), sums
