"""Policy losses: functions of log-probs and advantages per token, independent of the engine and the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specrl.algorithms.tensors import Tensor
from specrl.config.algorithms import LOSSES, Options
from specrl.config.base import PositiveFloat


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. Every tensor is [batch, seq] with one response per row; only tokens in the mask count."""

    logprobs: Tensor
    """Log-probs under the policy being trained, float32, in nats, which carry the gradient. They refer to the whole
    distribution at the sampling temperature; see `specrl.algorithms.objective`."""
    old_logprobs: Tensor
    """Log-probs under the policy before the step's first update, detached, in nats. With `train.updates_per_step = 1`
    they equal `logprobs`."""
    advantages: Tensor
    """The advantage of the response, at each of its tokens. `train.teacher` adds that of each token, so that a
    response's tokens may differ."""
    mask: Tensor
    """A bool tensor, True at response tokens."""


LossFunction = Callable[[LossInputs, Any], tuple[Tensor, dict[str, Tensor]]]
"""(inputs, options) -> (loss of each token, metrics); all are [batch, seq].

The loss of an update is the sum over its tokens, each weighted by `train.correction`, divided by the number of response
tokens of the step per update: the mean over the tokens of the global batch (DAPO, arXiv 2503.14476, equation 8).
Tokens of groups without signal count in it, with a loss of 0 unless there is a teacher, whether or not
`train.drop_zero_signal_groups` leaves them out; those that `train.refill_rounds` dropped or `train.overlong_filter`
left out do not count. `train.loss_mean` selects another mean. The unweighted mean of each metric over the trained
tokens is logged as `policy/NAME`.
"""
LARGEST_LOG_RATIO = 20.0
"""The largest log-ratio that is exponentiated, far beyond any clip: infinity times a clip's 0 would be NaN."""


register_loss: Callable[..., Callable[[LossFunction], LossFunction]] = LOSSES.register
"""Decorator that registers a policy loss for `train.loss` under a name, with a model of its options and the names of
all its `metrics`; with these, `train.stop_when` refuses any other name."""
CLIPPED_METRICS = ("clip_fraction",)
"""The metrics of losses that clip as PPO does."""


class GrpoLossOptions(Options):
    """The options of the loss `grpo`."""

    clip_low: PositiveFloat = 0.2
    """How far below 1 a token's ratio is clipped."""
    clip_high: PositiveFloat = 0.28
    """How far above 1 a token's ratio is clipped."""


@register_loss("grpo", GrpoLossOptions, metrics=CLIPPED_METRICS)
def grpo_loss(inputs: LossInputs, options: GrpoLossOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r) A) with r = p / p_old of each token: PPO's loss with DAPO's clip-higher."""
    ratio = (inputs.logprobs - inputs.old_logprobs).clamp(max=LARGEST_LOG_RATIO).exp()
    return _clipped(ratio, inputs.advantages, options.clip_low, options.clip_high)


class GspoLossOptions(Options):
    """The options of the loss `gspo`."""

    clip_low: PositiveFloat = 3e-4
    """How far below 1 a response's ratio is clipped."""
    clip_high: PositiveFloat = 4e-4
    """How far above 1 a response's ratio is clipped."""


@register_loss("gspo", GspoLossOptions, metrics=CLIPPED_METRICS)
def gspo_loss(inputs: LossInputs, options: GspoLossOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO's loss with one ratio per response, the geometric mean of its tokens' ratios (arXiv 2507.18071)."""
    log_ratio = (inputs.logprobs - inputs.old_logprobs) * inputs.mask
    ratio = (log_ratio.sum(1) / inputs.mask.sum(1).clamp(min=1)).clamp(max=LARGEST_LOG_RATIO).exp()
    return _clipped(ratio[:, None], inputs.advantages, options.clip_low, options.clip_high)


class CispoLossOptions(Options):
    """The options of the loss `cispo`."""

    clip_high: PositiveFloat = 0.28
    """How far above 1 a token's weight is clipped."""


@register_loss("cispo", CispoLossOptions, metrics=CLIPPED_METRICS)
def cispo_loss(inputs: LossInputs, options: CispoLossOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r, 1 + clip_high) A log p with a detached weight: no token loses its gradient (arXiv 2506.13585)."""
    ratio = (inputs.logprobs - inputs.old_logprobs).clamp(max=LARGEST_LOG_RATIO).exp().detach()
    weight = ratio.clamp(max=1 + options.clip_high)
    return -weight * inputs.advantages * inputs.logprobs, {"clip_fraction": (ratio > weight).float()}


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = (ratio * advantages).minimum(clipped * advantages)
    is_clipped = (ratio * advantages > clipped * advantages).float()
    return -gain, {"clip_fraction": is_clipped}
