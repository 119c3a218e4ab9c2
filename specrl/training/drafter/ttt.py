"""Training-time test (EAGLE-3, arXiv:2503.01840): the drafter is unrolled in training exactly as it drafts.

A *chain* starts at a slot c of a response: it reads token c + 1 and the policy's feature of token c, and predicts
token c + 2. Step j moves it to slot c + j: it reads the true token c + j + 1 and the chain's own output of step j - 1.
Its query sees the keys of the policy-fed slots up to c (the same for every step) and the chain's own keys after
that. Only chains are computed step by step: prompt slots contribute only keys and values, padding contributes nothing,
and a chain ends with its response. A drafter of several layers computes all but the last one for every slot, because
the keys of a layer depend on the output of the layer before it.

Chains do not see each other. A micro-batch with many chains is trained in parts, each forward and backward through all
of its steps before the next, so that memory grows only with the slots, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specrl.training.batches import rows_of
from specrl.training.drafter.attention import attend
from specrl.training.drafter.chains import ChainBatch, Part
from specrl.training.drafter.kinds.layers import DraftModule

LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits, target) -> (loss, gradient), see `specrl/algorithms/draft_losses.py`."""


@dataclass(frozen=True)
class Objective:
    loss: LossFunction
    weights: Sequence[float]
    """The weight of each step in the loss; steps beyond those of a batch are not used."""


class Context(NamedTuple):
    """The tensors of the policy-fed slots that the chains read; all slots' tensors are in memory at once."""

    embedded: Tensor
    """The results of `DraftModule.embed`, `[slots, hidden]`."""
    residual: Tensor
    """The residual stream of the last layer, `[slots, hidden]`."""
    x: Tensor
    """The input of the last layer's attention, `[slots, width of the input]`."""
    keys: list[Tensor]
    """The rotated keys of each layer, `[slots, kv_heads, head_dim]`."""
    values: list[Tensor]
    """The values of each layer, `[slots, kv_heads, head_dim]`."""

    def detached(self, *, learn: bool) -> Context:
        """The same values, as leaves of a separate graph."""
        embedded, residual, x, *rest = (tensor.detach().requires_grad_(learn) for tensor in self.tensors())
        return Context(embedded, residual, x, rest[: len(self.keys)], rest[len(self.keys) :])

    def tensors(self) -> list[Tensor]:
        return [self.embedded, self.residual, self.x, *self.keys, *self.values]


def feed_context(model: DraftModule, batch: ChainBatch) -> Context:
    """Compute step 0 of all slots, up to the attention of the last layer."""
    rows, columns = batch.slot_rows, batch.columns
    embedded = model.embed(batch.features.tokens[rows, columns + 1], batch.positions)
    width = len(model.shape.feature_layers) * model.shape.hidden_size
    hidden = model.feed(batch.features.hidden[..., :width][rows, columns])
    all_keys, all_values = [], []
    for layer, attention in enumerate(model.attentions):
        residual, x = model.enter(layer, embedded, hidden)
        keys, values = attention.keys_values(x, batch.positions)
        all_keys.append(keys)
        all_values.append(values)
        if layer + 1 < len(model.attentions):
            queries = attention.queries(x, batch.positions)
            attended = attend(queries, keys, values, batch.spans(), window=model.shape.sliding_window)
            hidden = model.finish(layer, residual, attended)
    return Context(embedded, residual, x, all_keys, all_values)


def unroll(model: DraftModule, batch: ChainBatch, context: Context, part: Part) -> Iterator[Tensor]:
    """Draft with the chains of a part, and yield each step's logits `[alive, draft_vocab]` of the chains alive."""
    keys, values = ([rows_of(x, part.slots) for x in kind] for kind in (context.keys, context.values))
    own_keys, own_values = ([list[Tensor]() for _ in model.attentions] for _ in range(2))
    window = model.shape.sliding_window
    starts, last = batch.starts[part.chains], len(model.attentions) - 1
    residual, x = context.residual.index_select(0, starts), context.x.index_select(0, starts)
    hidden = residual
    for step, alive in enumerate(part.alive):
        slots, places = batch.starts[alive] + step, alive - part.chains.start
        positions = batch.positions[slots]
        if step:
            hidden = hidden.index_select(0, torch.searchsorted(part.alive[step - 1], alive))
            embedded = context.embedded.index_select(0, slots)
        for layer in range(0 if step else last, last + 1):
            attention = model.attentions[layer]
            if step:
                residual, x = model.enter(layer, embedded, hidden)
                own = attention.keys_values(x, positions)
                own_keys[layer].append(_spread(own[0], places, part.size))
                own_values[layer].append(_spread(own[1], places, part.size))
            attended = attend(
                _spread(attention.queries(x, positions), places, part.size),
                keys[layer],
                values[layer],
                part.spans,
                window=None if window is None else window - step,  # a chain always sees all of itself, being shorter
                own_keys=own_keys[layer],
                own_values=own_values[layer],
            )
            hidden = model.finish(layer, residual, attended.index_select(0, places))
        yield model.logits(hidden)


def _spread(x: Tensor, places: Tensor, size: int) -> Tensor:
    return x if len(x) == size else x.new_zeros(size, *x.shape[1:]).index_copy(0, places, x)


def target_probs(model: DraftModule, batch: ChainBatch, part: Part) -> Tensor:
    """The policy's distribution on the draft vocabulary at a part's targets, float32 `[targets, draft_vocab]`.

    The targets are the step-0 targets of the part's chains, and of later chains that its last ones reach.
    """
    starts = batch.starts[part.chains.start : part.chains.stop + len(part.alive) - 1]
    last = batch.features.hidden[..., -model.shape.hidden_size :]
    return model.policy_logits(last[batch.slot_rows[starts], batch.columns[starts] + 1]).float().softmax(-1)


def train_chains(
    model: DraftModule,
    batch: ChainBatch,
    objective: Objective,
    counts: Tensor,
    *,
    learn: bool,
    tally: Tally | None = None,
) -> Tensor:
    """The loss of a micro-batch; with `learn`, add its gradient to the parameters'.

    It is the weighted sum over steps of the tokens' summed losses, divided by `counts[step]`, their number over all
    ranks.
    """
    with _computing(model, batch, learn):
        fed = feed_context(model, batch)
    # Detached here: the gradients of all parts accumulate at the context, and pass through it once.
    context = fed.detached(learn=learn)
    total = torch.zeros((), device=batch.starts.device)
    for part in batch.parts():
        with _computing(model, batch, learn):
            loss = _part_loss(model, batch, context, part, objective, counts, tally)
        if learn:
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    if learn:
        pairs = zip(fed.tensors(), context.tensors(), strict=True)
        reached = [(tensor, leaf.grad) for tensor, leaf in pairs if leaf.grad is not None]
        torch.autograd.backward([tensor for tensor, _ in reached], [gradient for _, gradient in reached])
    return total


@contextmanager
def _computing(model: DraftModule, batch: ChainBatch, learn: bool) -> Iterator[None]:
    # A policy in BF16 may have a drafter that was made for it in float32: see `specrl bench run`.
    features = batch.features.hidden
    is_bf16 = torch.bfloat16 in (model.shape.dtype, features.dtype)
    with torch.set_grad_enabled(learn), torch.autocast(features.device.type, torch.bfloat16, enabled=is_bf16):
        yield


def _part_loss(
    model: DraftModule,
    batch: ChainBatch,
    context: Context,
    part: Part,
    objective: Objective,
    counts: Tensor,
    tally: Tally | None,
) -> Tensor:
    probs = target_probs(model, batch, part)
    total = probs.new_zeros(())
    for step, (logits, alive) in enumerate(zip(unroll(model, batch, context, part), part.alive, strict=True)):
        target = alive + step
        p = probs[target - part.chains.start]
        weight = objective.weights[step] / counts[step].clamp(min=1).float()
        weights = weight * batch.target_in_vocab[target]
        total = total + _StepLoss.apply(logits, p, weights, objective.loss)  # type: ignore[no-untyped-call]
        if tally is not None:
            tally.add(step, alive, logits.detach(), p)
    return total


class _StepLoss(torch.autograd.Function):
    """Computes the weighted sum of the tokens' losses in float32, and keeps only its gradient, in the logits' type."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weights: Tensor, loss: LossFunction) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            terms, gradient = loss(logits.float(), target)
        ctx.save_for_backward(gradient.mul_(weights[:, None]).to(logits.dtype))
        return (terms * weights).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None, None


class Tally:
    """Counts the drafts of a micro-batch's chains, and the correct ones."""

    def __init__(self, batch: ChainBatch, draft_tokens: Tensor) -> None:
        self._batch = batch
        self._draft_tokens = draft_tokens
        steps, device = len(batch.alive), draft_tokens.device
        self._sums = torch.zeros(steps + 1, 3, dtype=torch.float64, device=device)
        self._matches = torch.zeros(len(batch.starts), steps, dtype=torch.bool, device=device)

    @torch.no_grad()
    def add(self, step: int, alive: Tensor, logits: Tensor, p: Tensor) -> None:
        """Count the drafts of the chains `alive` at a step; logits and the policy's `p` are `[alive, draft_vocab]`."""
        batch, target = self._batch, alive + step
        drafted = logits.argmax(-1)
        drafts, counted = self._draft_tokens[drafted], batch.target_in_vocab[target]
        sampled = batch.sampled[target]
        self._matches[alive, step] = (drafts == batch.truth[target]) & sampled
        self._sums[step, 0] += sampled.sum()
        self._sums[step, 1] += (drafts == batch.target_top1[target]).sum()
        self._sums[step, 2] += (p.gather(1, drafted[:, None])[:, 0] * counted).sum()

    def sums(self) -> Tensor:
        """The sums that `metrics_from_sums` reads, float64 `[steps + 1, 3]`; they are additive over batches and ranks.

        A step's row holds the number of chains, the number of drafts that are the policy's most likely token, and the
        sum of p(draft). The last row holds the numbers of drafts and accepted tokens if the responses were decoded
        again with k = steps: the sampler is drafter-invariant, so the same responses would be sampled, and a draft is
        accepted if it is the response's token.
        """
        both = torch.stack([self._matches.long().cumprod(1).sum(1), self._batch.sampled.long()])
        accepted, sampled = both.tolist()
        counts = _replay(accepted, sampled, self._batch.chains_per_row)
        self._sums[-1, :2] = torch.tensor(counts, dtype=torch.float64)
        return self._sums


def _replay(accepted: list[int], sampled: list[int], chains_per_row: list[int]) -> tuple[int, int]:
    """The numbers of drafts and of accepted tokens if the responses were decoded again.

    After a chain with `a` accepted tokens, decoding continues with the chain `a + 1` places later. Chains whose first
    target was not `sampled` draft nothing.
    """
    drafts = total = first = 0
    for count in chains_per_row:
        chain = first
        while chain < first + count:
            drafts, total = drafts + sampled[chain], total + accepted[chain]
            chain += accepted[chain] + 1
        first += count
    return drafts, total


def metrics_from_sums(sums: Tensor) -> dict[str, float]:
    """`top1_match` (of the first step), `num_tokens` (the number of chains), `acceptance_length` at k = steps,
    and `expected_acceptance_pos_i`.

    The expected acceptance at position i, from 0, is the mean of p(draft) over the chains alive there, whose earlier
    tokens are the response's own. p is the policy's distribution on the draft vocabulary, and counts as 0 if the
    policy's most likely token is outside it. Without anything to draft, the acceptance length is 1 and all else is 0.
    """
    steps = sums[:-1] / sums[:-1, :1].clamp(min=1)
    drafts, accepted = sums[-1, 0].item(), sums[-1, 1].item()
    metrics = {
        "top1_match": steps[0, 1].item(),
        "num_tokens": sums[0, 0].item(),
        "acceptance_length": 1 + accepted / max(drafts, 1),
    }
    for position, row in enumerate(steps.tolist()):
        metrics[f"expected_acceptance_pos_{position}"] = row[2]
    return metrics
