"""Log-probability, entropy and most likely token from logits, in one pass over a vocabulary that ranks share.

For logits x at temperature T, z = x / T:  log p(y) = z_y - log Z,  H = log Z - sum_v p_v z_v,  log Z = logsumexp(z).
The gradient of log p(y) is (1[v = y] - p_v) / T, and that of H is -p_v (log p_v + H) / T.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}
"""The number of logits that are turned to float32 at a time: so few on a CPU that they stay in its cache."""


class _TokenScores(torch.autograd.Function):
    """Computes log-probabilities and entropies, and overwrites the logits with what the backward pass needs.

    The forward pass leaves e^(z - max) where the logits were, which is the gradient up to rounding and a factor per
    row. Nobody else reads the logits, and so the largest tensor of the step exists only once. The gradient at the
    target is a difference of nearly equal numbers where the policy is confident: it is computed apart, in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, first: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        scale = 1.0 / temperature
        local = targets - first
        peak, total, weighted, chosen = _local_sums(logits, local, scale, keep_weights=ctx.needs_input_grad[0])
        shrink = torch.ones_like(peak)
        if group.size() > 1:
            highest = peak.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            shrink = torch.exp(peak - highest)
            sums = torch.stack((total * shrink, weighted * shrink, chosen))
            dist.all_reduce(sums, group=group)
            peak, (total, weighted, chosen) = highest, sums.unbind()
        log_z = peak + total.log()
        logprobs, entropy = chosen - log_z, log_z - weighted / total
        ctx.save_for_backward(logits, local, logprobs, entropy, shrink / total)
        ctx.scale = scale
        ctx.set_materialize_grads(False)  # most losses do not read the entropy
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        weights, targets, logprobs, entropy, factor = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logprobs)
        grad: Tensor = weights.detach()
        slope = -grad_logprobs * ctx.scale
        for part in _chunks(grad):
            if grad_entropy is None:
                grad[part].mul_((slope * factor)[part, None].to(grad.dtype))
                continue
            p = grad[part].float() * factor[part, None]
            of_entropy = torch.xlogy(p, p).addcmul_(p, entropy[part, None])
            grad[part] = p.mul_(slope[part, None]).addcmul_(of_entropy, -ctx.scale * grad_entropy[part, None])
        mine = (targets >= 0) & (targets < grad.shape[1])
        columns = targets.clamp(0, grad.shape[1] - 1)[:, None]
        at_target = -torch.expm1(logprobs) * grad_logprobs * ctx.scale
        if grad_entropy is not None:
            at_target -= logprobs.exp() * (logprobs + entropy) * grad_entropy * ctx.scale
        at_target = at_target[:, None].to(grad.dtype)
        # The places of other ranks' targets are not picked out, for which the host would have to wait.
        grad.scatter_(1, columns, torch.where(mine[:, None], at_target, grad.gather(1, columns)))
        return grad, None, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


def _local_sums(
    logits: Tensor, targets: Tensor, scale: float, *, keep_weights: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Max z, sum e^(z - max), sum e^(z - max) z and z at the target, each [n] float32, over this rank's columns.

    z at the target is 0 where the target is among another rank's columns. With `keep_weights` the logits are
    overwritten with e^(z - max).
    """
    rows, vocabulary = logits.shape
    peak, total, weighted, chosen = logits.new_empty(4, rows, dtype=torch.float32).unbind()
    mine = (targets >= 0) & (targets < vocabulary)
    columns = targets.clamp(0, vocabulary - 1)
    for part in _chunks(logits):
        z = logits[part].to(torch.float32, copy=True)
        if scale != 1.0:
            z.mul_(scale)
        torch.amax(z, 1, out=peak[part])
        chosen[part] = torch.where(mine[part], z.gather(1, columns[part, None])[:, 0], 0.0)
        weights = torch.sub(z, peak[part, None]).exp_()
        torch.sum(weights, 1, out=total[part])
        if keep_weights:
            logits[part] = weights
        torch.sum(weights.mul_(z), 1, out=weighted[part])
    return peak, total, weighted, chosen


def token_scores(
    logits: Tensor, targets: Tensor, *, temperature: float, first: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of `targets` and the entropies, in nats, float32 [n] each.

    `logits` are [n, columns of this tensor-parallel rank], of which the first is vocabulary id `first`; they are
    overwritten if they require a gradient.
    """
    logprobs, entropy = _TokenScores.apply(logits, targets, temperature, first, group)  # type: ignore[no-untyped-call]
    return logprobs, entropy


@torch.no_grad()
def most_likely(logits: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """The vocabulary id of the largest logit, the lowest among equals: [n] int64; see `token_scores`."""
    value, column = logits.max(1)
    token = column + first
    if group.size() == 1:
        return token
    pairs = torch.stack((value.double(), token.double()))
    gathered = [torch.empty_like(pairs) for _ in range(group.size())]
    dist.all_gather(gathered, pairs, group=group)
    values, tokens = torch.stack(gathered).unbind(1)
    best = values.argmax(0)  # the first rank among equals holds the lowest ids
    return tokens.gather(0, best[None])[0].long()


@torch.no_grad()
def columns_of(logits: Tensor, tokens: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """The logits of some vocabulary ids `tokens` [m]: [n, m]; see `token_scores`."""
    if group.size() == 1:
        return logits.index_select(1, tokens)
    mine = (tokens >= first) & (tokens < first + logits.shape[1])
    selected = logits.new_zeros(logits.shape[0], len(tokens))
    selected[:, mine] = logits.index_select(1, tokens[mine] - first)
    dist.all_reduce(selected, group=group)
    return selected
