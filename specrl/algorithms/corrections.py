"""Corrections: token weights for the loss that make up for differences between the engine and the trainer.

The engine samples tokens with slightly different probabilities than the trainer computes; r = p_trainer / p_engine is
the importance ratio of a sampled token. Both are probabilities of the whole distribution at the sampling temperature,
so that r is near 1 even with `sampling.top_p` and `top_k`; `specrl.algorithms.objective` explains why. Tokens with
weight 0 still count in the number of tokens by which the loss is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from specrl.algorithms.tensors import Tensor
from specrl.config.algorithms import CORRECTIONS, Options
from specrl.config.base import PositiveFloat

CorrectionFunction = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
"""(log r, mask, options) -> (weights, corrected); all are [batch, seq], and one row is one response.

log r is detached and 0 outside the mask, which is True at response tokens. `corrected` is a bool tensor that marks the
tokens whose weight is not r, none of them for the correction `none`; `policy/corrected_fraction` is their share.
"""

register_correction: Callable[..., Callable[[CorrectionFunction], CorrectionFunction]] = CORRECTIONS.register
"""Decorator that registers a correction for `train.correction` under a name, with a model of its options."""


def _contains_one(allowed: tuple[float, float]) -> tuple[float, float]:
    low, high = allowed
    if not low < 1 < high:
        raise ValueError(f"[{low:g}, {high:g}] must contain 1, the ratio of engines that agree")
    return allowed


Range = Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_contains_one)]
"""The lowest and the highest ratio to keep, with 1 between them."""


@register_correction("none")
def none(log_ratio: Tensor, mask: Tensor, _: Options) -> tuple[Tensor, Tensor]:
    """Give every token the weight 1."""
    return log_ratio.new_ones(log_ratio.shape), mask.new_zeros(mask.shape)


class TisOptions(Options):
    """The options of the correction `tis`."""

    cap: PositiveFloat = 2.0
    """The largest ratio that is not truncated."""


@register_correction("tis", TisOptions)
def tis(log_ratio: Tensor, mask: Tensor, options: TisOptions) -> tuple[Tensor, Tensor]:
    """Truncate the importance ratio: min(r, cap).

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    ratio = log_ratio.exp()
    return ratio.clamp(max=options.cap), (ratio > options.cap) & mask


class IcepopOptions(Options):
    """The options of the correction `icepop`."""

    range: Range = (0.5, 5.0)
    """The lowest and the highest ratio at which a token is trained on."""


@register_correction("icepop", IcepopOptions)
def icepop(log_ratio: Tensor, mask: Tensor, options: IcepopOptions) -> tuple[Tensor, Tensor]:
    """Weight by r inside the range and by 0 outside it: tokens on which the engines disagree are not trained on.

    Ling team 2025, "Every step evolves: scaling reinforcement learning for trillion-scale thinking model"
    (arXiv:2510.18855).
    """
    ratio = log_ratio.exp()
    outside = _outside(ratio, options.range) & mask
    return ratio.masked_fill(outside, 0.0), outside


class SequenceMaskOptions(Options):
    """The options of the correction `seq-mask`."""

    cap: PositiveFloat = 2.0
    """The largest ratio that is not truncated."""
    range: Range = (0.5, 5.0)
    """The lowest and the highest ratio at which a response is trained on."""
    by: Literal["any", "mean"] = "any"
    """When to drop a response: if the ratio of `any` of its tokens is outside the range, or if their geometric `mean`
    is."""


@register_correction("seq-mask", SequenceMaskOptions)
def sequence_mask(log_ratio: Tensor, mask: Tensor, options: SequenceMaskOptions) -> tuple[Tensor, Tensor]:
    """Truncate like `tis`, and give weight 0 to every token of the responses on which the engines disagree.

    Liu, Li et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".
    """
    ratio = log_ratio.exp()
    if options.by == "any":
        is_dropped = (_outside(ratio, options.range) & mask).any(1)
    else:
        mean = log_ratio.sum(1) / mask.sum(1).clamp(min=1)
        is_dropped = _outside(mean.exp(), options.range)
    dropped = mask & is_dropped[:, None]
    truncated = (ratio > options.cap) & mask
    return ratio.clamp(max=options.cap).masked_fill(dropped, 0.0), truncated | dropped


def _outside(ratio: Tensor, allowed: tuple[float, float]) -> Tensor:
    low, high = allowed
    return ~((ratio >= low) & (ratio <= high))
