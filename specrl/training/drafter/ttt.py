"""Training-time test (EAGLE-3, arXiv:2503.01840): the drafter is unrolled in training exactly as it drafts.

A *chain* starts at a slot c of a response: it has token c + 1 beside the policy's feature of token c, and predicts
token c + 2. Step j moves it to slot c + j: the true token c + j + 1 beside the chain's own output of step j - 1. Its
query sees the keys of the policy-fed slots up to c (`visible`, the same for every step) and the chain's own keys after
that. Only chains are computed step by step: prompt slots contribute keys and values alone, padding contributes nothing,
and a chain ends where its response does.

Chains do not see each other. A micro-batch with many of them is trained in parts, each forward and backward through all
of its steps before the next, so that memory grows with the slots alone, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specrl.training.drafter.chains import ChainBatch, Part
from specrl.training.drafter.layers import DraftModule, chain_attention

STEP_DECAY = 0.8
"""The weight of step j in the loss is STEP_DECAY ** j."""


class Context(NamedTuple):
    """The tensors of the policy-fed slots that the chains read; those of all slots are in memory at once."""

    embedded: Tensor
    """The results of `DraftModule.embed`, `[slots, hidden]`."""
    residual: Tensor
    """The residual stream, `[slots, hidden]`."""
    x: Tensor
    """The attention's input, `[slots, width of the input]`."""
    keys: Tensor
    """The rotated keys, `[rows, width, kv_heads, head_dim]`."""
    values: Tensor
    """The values, `[rows, width, kv_heads, head_dim]`."""


def feed_context(model: DraftModule, batch: ChainBatch) -> Context:
    """Compute step 0 of all slots, up to the attention."""
    rows, columns = batch.slot_rows, batch.columns
    embedded = model.embed(batch.features.tokens[rows, columns + 1], batch.positions)
    residual, x = model.enter(embedded, model.feed(batch.features.hidden[rows, columns]))
    keys, values = (
        _spread(part, batch.slot_places, len(batch.chains_per_row), batch.width)
        for part in model.attention.keys_values(x, batch.positions)
    )
    return Context(embedded, residual, x, keys, values)


def unroll(model: DraftModule, batch: ChainBatch, context: Context, part: Part) -> Iterator[Tensor]:
    """Draft with the chains of a part, step by step.

    Yields:
        For each step, the draft-vocabulary logits `[alive, draft_vocab]` of the chains in `part.alive[step]`.
    """
    attention = model.attention
    rows_count, columns, width = part.visible.shape
    all_keys, all_values = [context.keys[part.rows, :width]], [context.values[part.rows, :width]]
    starts = batch.starts[part.chains]
    residual, x = context.residual.index_select(0, starts), context.x.index_select(0, starts)
    hidden = residual
    for step, alive in enumerate(part.alive):
        slots, places = batch.starts[alive] + step, part.places[alive - part.chains.start]
        if step:
            hidden = hidden.index_select(0, _positions_within(alive, part.alive[step - 1]))
            residual, x = model.enter(context.embedded.index_select(0, slots), hidden)
            own = attention.keys_values(x, batch.positions[slots])
            all_keys.append(_spread(own[0], places, rows_count, columns))
            all_values.append(_spread(own[1], places, rows_count, columns))
        queries = attention.queries(x, batch.positions[slots])
        queries = _spread(queries, places, rows_count, columns)
        attended = chain_attention(queries, all_keys, all_values, part.visible)
        hidden = model.finish(residual, attended.flatten(0, 1).index_select(0, places))
        yield model.logits(hidden)


def _spread(x: Tensor, places: Tensor, rows: int, width: int) -> Tensor:
    """Return packed `[n, ...]` at its places in a padded `[rows, width, ...]`, with zeros elsewhere."""
    padded = x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, places, x)
    return padded.view(rows, width, *x.shape[1:])


def _positions_within(part: Tensor, whole: Tensor) -> Tensor:
    """Return the index in sorted `whole` of each element of its subset `part`."""
    return torch.searchsorted(whole, part)


def target_probs(batch: ChainBatch, part: Part, policy_head: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the policy's distribution on the draft vocabulary at the targets of a part, float32.

    Args:
        policy_head: Computes the logits where the features hold no targets, from hidden states `[targets, hidden]`.

    Returns:
        `[targets, draft_vocab]`: the step-0 targets of the part's chains, and of the chains after them that its last
        ones reach in later steps.
    """
    starts = batch.starts[part.chains.start : part.chains.stop + len(part.alive) - 1]
    rows, columns = batch.slot_rows[starts], batch.columns[starts] + 1
    if policy_head is None:
        logits = batch.features.logits(rows, columns)
    else:
        logits = policy_head(batch.features.hidden[rows, columns])
    return logits.float().softmax(-1)


def train_chains(
    model: DraftModule, batch: ChainBatch, counts: Tensor, *, learn: bool, tally: Tally | None = None
) -> Tensor:
    """Return the loss of a micro-batch, in nats, and with `learn` add its gradient to the parameters'.

    The loss is the soft cross-entropy to the policy's distribution, divided at each step by `counts[step]`, weighted by
    STEP_DECAY and summed over the steps.

    Args:
        counts: float64 `[steps]`: the number of terms at each step over all ranks, so that gradients summed over ranks
            weight every token alike.
        tally: Counts what the chains draft.
    """
    with _computing(model, learn):
        fed = feed_context(model, batch)
    # Cut here: the gradients of all parts come together at the context, and go through it once.
    context = Context(*(tensor.detach().requires_grad_(learn) for tensor in fed))
    total = torch.zeros((), device=batch.starts.device)
    for part in batch.parts():
        with _computing(model, learn):
            loss = _part_loss(model, batch, context, part, counts, tally)
        if learn:
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    if learn:
        reached = [(tensor, leaf.grad) for tensor, leaf in zip(fed, context, strict=True) if leaf.grad is not None]
        torch.autograd.backward([tensor for tensor, _ in reached], [gradient for _, gradient in reached])
    return total


@contextmanager
def _computing(model: DraftModule, learn: bool) -> Iterator[None]:
    device, dtype = next(model.parameters()).device, model.shape.dtype
    with (
        torch.set_grad_enabled(learn),
        torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16),
    ):
        yield


def _part_loss(
    model: DraftModule, batch: ChainBatch, context: Context, part: Part, counts: Tensor, tally: Tally | None
) -> Tensor:
    probs = target_probs(batch, part, model.policy_head)
    total = probs.new_zeros(())
    for step, (logits, alive) in enumerate(zip(unroll(model, batch, context, part), part.alive, strict=True)):
        target = alive + step
        p = probs[target - part.chains.start]
        terms = F.cross_entropy(logits.float(), p, reduction="none")
        weight = STEP_DECAY**step / counts[step].clamp(min=1).float()
        total = total + weight * (terms * batch.target_in_vocab[target]).sum()
        if tally is not None:
            tally.add(step, alive, logits.detach(), p)
    return total


class Tally:
    """Counts the drafts of a micro-batch's chains, and those that are right."""

    def __init__(self, batch: ChainBatch, draft_tokens: Tensor) -> None:
        self._batch = batch
        self._draft_tokens = draft_tokens
        steps, device = len(batch.alive), draft_tokens.device
        self._sums = torch.zeros(steps + 1, 3, dtype=torch.float64, device=device)
        self._matches = torch.zeros(len(batch.starts), steps, dtype=torch.bool, device=device)

    @torch.no_grad()
    def add(self, step: int, alive: Tensor, logits: Tensor, p: Tensor) -> None:
        """Count the drafts of the chains `alive` at a step.

        Args:
            logits: The drafter's logits, `[alive, draft_vocab]`.
            p: The policy's probabilities at the same targets, `[alive, draft_vocab]`.
        """
        batch, target = self._batch, alive + step
        drafted = logits.argmax(-1)
        drafts, counted = self._draft_tokens[drafted], batch.target_in_vocab[target]
        self._matches[alive, step] = drafts == batch.truth[target]
        self._sums[step, 0] += len(alive)
        self._sums[step, 1] += (drafts == batch.target_top1[target]).sum()
        self._sums[step, 2] += (p.gather(1, drafted[:, None])[:, 0] * counted).sum()

    def sums(self) -> Tensor:
        """Return the sums that `metrics_from_sums` reads, float64 `[steps + 1, 3]`; they add up over batches and ranks.

        A step's row holds the number of chains, the number of drafts that are the policy's most likely token, and the
        sum of p(draft). The last row holds the numbers of drafts and of accepted tokens if the responses were decoded
        again with k = steps: the sampler is drafter-invariant, so that the same responses would be sampled, and a draft
        is accepted when it is the response's token.
        """
        accepted = self._matches.long().cumprod(1).sum(1).tolist()
        self._sums[-1, :2] = torch.tensor(_replay(accepted, self._batch.chains_per_row), dtype=torch.float64)
        return self._sums


def _replay(accepted: list[int], chains_per_row: list[int]) -> tuple[int, int]:
    """Return the numbers of drafts and of accepted tokens when the responses are decoded again.

    After a chain that had `a` tokens accepted, decoding goes on with the chain `a + 1` places behind it.
    """
    drafts = total = first = 0
    for count in chains_per_row:
        chain = first
        while chain < first + count:
            drafts, total = drafts + 1, total + accepted[chain]
            chain += accepted[chain] + 1
        first += count
    return drafts, total


def metrics_from_sums(sums: Tensor) -> dict[str, float]:
    """Return `top1_match` (of the first step), `num_tokens` (the number of chains), `acceptance_length` at k = steps,
    and `expected_acceptance_pos_i`.

    The expected acceptance at position i, from 0, is the mean of p(draft) over the chains that are alive there, whose
    earlier tokens are the response's own. p is the policy's distribution on the draft vocabulary, and counts as 0 where
    the policy's most likely token is outside of it. Without anything to draft, the acceptance length is 1 and all else
    is 0.
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
