"""Losses of the drafter: functions of its logits and the policy's distribution, which know neither the model nor torch.

Each returns its own gradient, so that one pass over the draft vocabulary gives both, and no intermediate result is kept
for the backward pass.

What acceptance is depends on how drafts are made. Here a draft is the drafter's most likely token, and it is accepted
if it is the token that the policy samples with its own noise (`specrl/rollout/sampling`): with probability
p(draft), whatever the drafter's distribution q is beside its maximum. So the best that a drafter can do is to put its
maximum where the policy's is, and any loss with that optimum would do for a drafter without limits; a small one has to
choose where to be right. In rejection sampling of sampled drafts, as in other engines, acceptance is the overlap
sum_v min(p(v), q(v)) = 1 - TV(p, q).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specrl.algorithms.tensors import Tensor
from specrl.config.algorithms import DRAFT_LOSSES, Options
from specrl.config.base import PositiveFloat

DraftLossFunction = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
"""(logits, target, options) -> (loss, gradient).

`logits` are the drafter's and `target` is the policy's distribution p, both float32 [n, draft vocabulary] and neither
to be changed; each row of `target` adds up to 1. The loss is [n], and the gradient, [n, draft vocabulary], is its
derivative by the logits, row by row. q stands for the softmax of the logits.
"""

register_draft_loss: Callable[..., Callable[[DraftLossFunction], DraftLossFunction]] = DRAFT_LOSSES.register
"""The decorator that registers a loss of the drafter for `drafter.loss` under a name, with the model of its options."""


@register_draft_loss("cross_entropy")
def cross_entropy(logits: Tensor, target: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """-sum p log q.

    It is the forward KL divergence KL(p || q) plus the entropy of p, in which q has no part: both have the same
    gradient, q - p.
    """
    log_q = logits.log_softmax(-1)
    loss = -_dot(target, log_q)
    return loss, log_q.exp_().sub_(target)


class LkHybridOptions(Options):
    """The options of the loss `lk_hybrid`."""

    decay: PositiveFloat = 3.0
    """How fast the share of the cross-entropy falls with the overlap; 3 is the paper's best."""


@register_draft_loss("lk_hybrid", LkHybridOptions)
def lk_hybrid(logits: Tensor, target: Tensor, options: LkHybridOptions) -> tuple[Tensor, Tensor]:
    """A mixture of cross-entropy and total variation, w CE + (1 - w) TV, of each token (arXiv 2602.23881).

    w = exp(-decay * overlap) carries no gradient: a token that the drafter knows little about is learnt by
    cross-entropy, a known one by total variation. The paper calls it LK-lambda and has the forward KL in place of the
    cross-entropy, which has the same gradient.
    """
    log_q = logits.log_softmax(-1)
    entropy = -_dot(target, log_q)
    q = log_q.exp_()
    overlap, gradient = _overlap(q, target)
    weight = (-options.decay * overlap).exp_()
    loss = weight * entropy + (1 - weight) * (1 - overlap)
    gradient.mul_((1 - weight)[:, None]).addcmul_(q.sub_(target), weight[:, None])
    return loss, gradient


def _overlap(q: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    above = (q >= target).to(q.dtype)
    kept = _dot(target, above)
    below = above.neg_().add_(1)
    reached = _dot(q, below)
    return kept + reached, below.neg_().add_(reached[:, None]).mul_(q)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    product: Tensor = (left[:, None] @ right[:, :, None])[:, 0, 0]
    return product
