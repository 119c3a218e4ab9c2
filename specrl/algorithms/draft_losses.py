"""Losses of the drafter: functions of its logits and the policy's distribution, independent of the model and torch.

Each returns its own gradient, so that one pass over the draft vocabulary yields both, and no intermediate result is
kept for the backward pass.

Acceptance depends on how drafts are chosen. Here a draft is the drafter's most likely token, and it is accepted if it
is the token that the policy samples with its own noise (`specrl/rollout/sampling`): with probability p(draft), whatever
the drafter's distribution q is apart from its maximum. The best drafter therefore has its maximum at the policy's, and
any loss with that optimum would suffice for a drafter of unlimited capacity; a small one must choose where to be right.
In rejection sampling of sampled drafts, as in other engines, acceptance is the overlap
sum_v min(p(v), q(v)) = 1 - TV(p, q).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specrl.algorithms.tensors import Tensor
from specrl.config.algorithms import DRAFT_LOSSES, Options

DraftLossFunction = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
"""(logits, target, options) -> (loss, gradient).

`logits` are the drafter's and `target` is the policy's distribution p, both float32 [n, draft vocabulary] and neither
to be changed; each row of `target` adds up to 1. The loss is [n], and the gradient, [n, draft vocabulary], is its
derivative by the logits, row by row. q stands for the softmax of the logits.
"""

register_draft_loss: Callable[..., Callable[[DraftLossFunction], DraftLossFunction]] = DRAFT_LOSSES.register
"""Decorator that registers a drafter's loss for `drafter.loss` under a name, with a model of its options."""


@register_draft_loss("cross_entropy")
def cross_entropy(logits: Tensor, target: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """-sum p log q.

    It is the forward KL divergence KL(p || q) plus the entropy of p, which does not depend on q: both have the same
    gradient, q - p.
    """
    log_q = logits.log_softmax(-1)
    # As a product of matrices, the sum needs no other [n, draft vocabulary] in memory.
    loss = -(target[:, None] @ log_q[:, :, None])[:, 0, 0]
    return loss, log_q.exp_().sub_(target)
