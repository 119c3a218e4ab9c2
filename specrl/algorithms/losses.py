"""Policy losses: functions of log-probs and advantages, token by token; they know no engine and no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specrl.algorithms.tensors import Tensor
from specrl.config.algorithms import LOSSES, Options
from specrl.config.base import PositiveFloat


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch, [batch, seq] each: a row is a response, and what is outside the mask counts for nothing."""

    logprobs: Tensor
    """float32 log-probs under the policy being trained, nats; they carry the gradient."""
    old_logprobs: Tensor
    """Log-probs under the policy that the update started from, detached. With `train.updates_per_step = 1` they equal
    `logprobs`."""
    advantages: Tensor
    mask: Tensor
    """bool: True at response tokens."""


LossFunction = Callable[[LossInputs, Any], tuple[Tensor, dict[str, Tensor]]]
"""(inputs, options) -> (loss of each token, metrics); all are [batch, seq].

The loss of an update is the mean over the tokens of the global batch (DAPO, arXiv 2503.14476, equation 8), each token's
weighted by `train.correction`. The same mean of each metric is logged as `policy/NAME`.
"""


def register_loss(name: str, options: type[Options] = Options) -> Callable[[LossFunction], LossFunction]:
    """Return the decorator that registers a policy loss under `name` for `train.loss`."""
    return LOSSES.register(name, options)


class GrpoOptions(Options):
    clip_low: PositiveFloat = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """The ratio is clipped above 1 + clip_high."""


@register_loss("grpo", GrpoOptions)
def grpo(inputs: LossInputs, options: GrpoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -min(r A, clip(r) A) with r = p / p_old of each token: PPO's loss with DAPO's clip-higher."""
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return _clipped(ratio, inputs.advantages, options.clip_low, options.clip_high)


class GspoOptions(Options):
    clip_low: PositiveFloat = 3e-4
    """The ratio of a response is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """The ratio of a response is clipped above 1 + clip_high."""


@register_loss("gspo", GspoOptions)
def gspo(inputs: LossInputs, options: GspoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Return GRPO's loss with one ratio for each response, the geometric mean of its tokens' (arXiv 2507.18071).

    The paper averages within each response first; here, as with every loss, a response counts by its tokens.
    """
    log_ratio = (inputs.logprobs - inputs.old_logprobs) * inputs.mask
    ratio = (log_ratio.sum(1) / inputs.mask.sum(1).clamp(min=1)).exp()
    return _clipped(ratio[:, None], inputs.advantages, options.clip_low, options.clip_high)


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = (ratio * advantages).minimum(clipped * advantages)
    is_clipped = (ratio * advantages > clipped * advantages).float()
    return -gain, {"clip_fraction": is_clipped}
