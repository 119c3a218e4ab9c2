"""Log-probability, entropy and most likely token from hidden states, over a vocabulary that ranks share.

For logits x at temperature T, z = x / T:  log p(y) = z_y - log Z,  H = log Z - sum_v p_v z_v,  log Z = logsumexp(z).
The gradient of log p(y) is (1[v = y] - p_v) / T, and that of H is -p_v (log p_v + H) / T.

Logits exist for a bounded number of tokens at a time. Those of the last tokens are kept for the backward pass; the
others are recomputed there, at the cost of one more product with the output layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

MAX_LOGITS = 2**27
"""The most logits, in the compute type, that exist at a time."""
CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**25}
"""The number of logits converted to float32 at a time: on a CPU few enough to stay in its cache."""


@dataclass(frozen=True)
class OutputLayer:
    """The output layer's part on this tensor-parallel rank."""

    weight: Tensor
    """[columns and padding, hidden]; if logits do not fit at once, part of its gradient, if it has one, goes to its
    `main_grad`."""
    logits: Callable[[Tensor], Tensor]
    """A function of [n, hidden] that returns [n, columns], without padding."""
    first: int
    """The vocabulary id of the first column."""
    columns: int
    group: dist.ProcessGroup


class _TokenScores(torch.autograd.Function):
    """Computes log-probabilities and entropies, and overwrites logits with what the backward pass needs.

    This is e^(z - max), the gradient up to rounding and a factor per row. The gradient at the target is a difference of
    nearly equal numbers if the policy is confident, so it is computed separately in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        layer: OutputLayer,
        on_logits: Callable[[Tensor], None] | None,
    ) -> tuple[Tensor, Tensor]:
        scale, local = 1.0 / temperature, targets - layer.first
        sums = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        parts = _parts(len(hidden), len(weight), MAX_LOGITS)  # padding included: the same on all ranks
        for part in parts:
            logits = None  # freed before the next logits are computed
            logits = layer.logits(hidden[part])
            if on_logits is not None:
                on_logits(logits)
            keep = ctx.needs_input_grad[0] and part == parts[-1]
            _local_sums(logits, local[part], scale, sums[:, part], keep_weights=keep)
        peak, total, weighted, chosen = sums.unbind()
        shrink, highest = torch.ones_like(peak), peak
        if layer.group.size() > 1:
            highest = peak.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=layer.group)
            shrink = torch.exp(peak - highest)
            shared = torch.stack((total * shrink, weighted * shrink, chosen))
            dist.all_reduce(shared, group=layer.group)
            total, weighted, chosen = shared.unbind()
        log_z = highest + total.log()
        logprobs, entropy = chosen - log_z, log_z - weighted / total
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(hidden, weight, local, logprobs, entropy, peak, shrink / total)
            ctx.layer, ctx.scale, ctx.last = layer, scale, logits
        ctx.set_materialize_grads(False)  # most losses do not read the entropy
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, logprobs, entropy, peak, normaliser = ctx.saved_tensors
        layer: OutputLayer = ctx.layer
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logprobs)
        gradient = _Gradient.of(logprobs, entropy, normaliser, ctx.scale, grad_logprobs, grad_entropy)
        columns, grad_hidden = weight[: layer.columns], torch.empty_like(hidden)
        logits, ctx.last = ctx.last, None
        *others, last = _parts(len(hidden), len(weight), MAX_LOGITS)
        order = (last, *others)
        for part in order:
            if part != last:
                logits = layer.logits(hidden[part])
                _exponentials(logits, peak[part], ctx.scale)
            gradient.replace(logits, targets[part], part)
            torch.mm(logits, columns, out=grad_hidden[part])
            if part != order[-1]:
                if ctx.needs_input_grad[1]:  # accumulated as over several micro-batches
                    weight.main_grad[: layer.columns].add_(logits.t() @ hidden[part])
                logits = None
        grad_weight = logits.t() @ hidden[order[-1]] if ctx.needs_input_grad[1] else None
        if grad_weight is not None and len(grad_weight) < len(weight):
            grad_weight = torch.cat((grad_weight, weight.new_zeros(len(weight) - len(grad_weight), weight.shape[1])))
        if layer.group.size() > 1:
            dist.all_reduce(grad_hidden, group=layer.group)
        return grad_hidden, grad_weight, None, None, None, None


def _parts(rows: int, columns: int, elements: int) -> list[slice]:
    step = max(1, elements // max(1, columns))
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


def _chunks(logits: Tensor) -> list[slice]:
    return _parts(len(logits), logits.shape[1], CHUNK_ELEMENTS[logits.device.type])


def _scaled(logits: Tensor, scale: float) -> Tensor:
    z = logits.to(torch.float32, copy=True)
    return z if scale == 1.0 else z.mul_(scale)


def _local_sums(logits: Tensor, targets: Tensor, scale: float, sums: Tensor, *, keep_weights: bool) -> None:
    """Fill `sums` [4, n], over this rank's columns: max z, sum e^(z - max), sum e^(z - max) z and z at the target.

    z at the target is 0 where the target is among another rank's columns. With `keep_weights` the logits are
    overwritten with e^(z - max).
    """
    peak, total, weighted, chosen = sums.unbind()
    mine = (targets >= 0) & (targets < logits.shape[1])
    columns = targets.clamp(0, logits.shape[1] - 1)
    for part in _chunks(logits):
        z = _scaled(logits[part], scale)
        torch.amax(z, 1, out=peak[part])
        chosen[part] = torch.where(mine[part], z.gather(1, columns[part, None])[:, 0], 0.0)
        weights = torch.sub(z, peak[part, None]).exp_()
        torch.sum(weights, 1, out=total[part])
        if keep_weights:
            logits[part] = weights
        torch.sum(weights.mul_(z), 1, out=weighted[part])
        del z, weights  # freed before the next ones are computed


def _exponentials(logits: Tensor, peak: Tensor, scale: float) -> None:
    """Overwrite the logits with e^(z - max)."""
    for part in _chunks(logits):
        logits[part] = _scaled(logits[part], scale).sub_(peak[part, None]).exp_()


class _Gradient(NamedTuple):
    """The coefficients that turn e^(z - max) into the gradient of the logits, for each token: [n]."""

    normaliser: Tensor
    """p = normaliser * e^(z - max)."""
    of_logprob: Tensor
    """The loss's gradient with respect to log p(y), over T."""
    of_entropy: Tensor | None
    """The loss's gradient with respect to H, over T; None if it has none."""
    entropy: Tensor
    at_target: Tensor
    """The gradient of the logit of y."""

    @classmethod
    def of(
        cls,
        logprobs: Tensor,
        entropy: Tensor,
        normaliser: Tensor,
        scale: float,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
    ) -> _Gradient:
        of_logprob, of_entropy = grad_logprobs * scale, None if grad_entropy is None else grad_entropy * scale
        at_target = -torch.expm1(logprobs) * of_logprob
        if of_entropy is not None:
            at_target -= logprobs.exp() * (logprobs + entropy) * of_entropy
        return cls(normaliser, of_logprob, of_entropy, entropy, at_target)

    def replace(self, weights: Tensor, targets: Tensor, rows: slice) -> None:
        """Overwrite the e^(z - max) of some tokens with the gradient."""
        normaliser, of_logprob, entropy = self.normaliser[rows], self.of_logprob[rows], self.entropy[rows]
        for part in _chunks(weights):
            if self.of_entropy is None:
                weights[part].mul_(-(of_logprob * normaliser)[part, None].to(weights.dtype))
                continue
            p = weights[part].float() * normaliser[part, None]
            p_log_p_plus_h = torch.xlogy(p, p).addcmul_(p, entropy[part, None])
            of_entropy = self.of_entropy[rows][part, None]
            weights[part] = p.mul_(-of_logprob[part, None]).addcmul_(p_log_p_plus_h, of_entropy, value=-1)
        mine = (targets >= 0) & (targets < weights.shape[1])
        columns = targets.clamp(0, weights.shape[1] - 1)[:, None]
        # Other ranks' targets are not filtered out, because the host would have to wait for that.
        here = self.at_target[rows, None].to(weights.dtype)
        weights.scatter_(1, columns, torch.where(mine[:, None], here, weights.gather(1, columns)))


def token_scores(
    hidden: Tensor,
    targets: Tensor,
    layer: OutputLayer,
    *,
    temperature: float,
    on_logits: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of `targets` and the entropies, in nats, float32 [n] each.

    The ranks that share the vocabulary call it together, with the same `hidden`, [n, hidden]. `on_logits` is called
    with the logits of successive groups of tokens, before the temperature is applied, and must not keep them.
    """
    logprobs, entropy = _TokenScores.apply(hidden, layer.weight, targets, temperature, layer, on_logits)  # type: ignore[no-untyped-call]
    return logprobs, entropy


@torch.no_grad()
def most_likely(logits: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """The vocabulary id of the largest logit, the lowest among equals: [n] int64, given [n, columns of this rank]."""
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
