"""Training-time test (EAGLE-3, arXiv:2503.01840): the drafter is unrolled in training exactly as it drafts.

A *chain* starts at a slot c of a response: it has token c + 1 beside the policy's feature of token c, and predicts
token c + 2. Step j moves it to slot c + j: the true token c + j + 1 beside the chain's own output of step j - 1. Its
query sees the keys of the policy-fed slots up to c (`visible`, the same for every step) and the chain's own keys after
that. Chains are what is computed: prompt slots only contribute keys and values, padding contributes nothing, and a
chain ends where its response does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specrl.training.draft_layers import DraftModule, chain_attention
from specrl.training.features import Features

STEP_DECAY = 0.8
"""Weight of step j in the loss is STEP_DECAY ** j."""


@dataclass(frozen=True)
class ChainBatch:
    """One micro-batch, packed. Slots of a row are consecutive, and so are the chains of a response: slot of chain n at
    step j is `starts[n] + j`, and its target is the step-0 target of chain `n + j`."""

    hidden: Tensor
    """`[slots, layers * hidden]`"""
    next_tokens: Tensor
    """int64 `[slots]`: token i + 1 of slot i."""
    positions: Tensor
    """int64 `[slots]`"""
    slot_places: Tensor
    """int64 `[slots]`: place in the padded `[batch, width]` layout, flattened."""
    starts: Tensor
    """int64 `[chains]`: index of the slot at which the chain starts."""
    chain_places: Tensor
    """int64 `[chains]`: place in the padded `[batch, max_chains]` layout, flattened."""
    visible: Tensor
    """bool `[batch, max_chains, width]`"""
    alive: list[Tensor]
    """Per step, int64 `[alive]`: the chains that have a target at that step; each list is within the one before."""
    target_probs: Tensor
    """float32 `[chains, draft_vocab]`: the policy's distribution on the draft vocabulary."""
    target_top1: Tensor
    """int64 `[chains]`, target ids."""
    target_in_vocab: Tensor
    """bool `[chains]`: `target_top1` is in the draft vocabulary; the others do not count in the loss."""
    truth: Tensor
    """int64 `[chains]`: token that follows in the response."""
    chains_per_row: list[int]

    def loss_counts(self) -> Tensor:
        """float64 `[steps]`: terms of the loss at each step."""
        return torch.stack([self.target_in_vocab[rows + j].sum() for j, rows in enumerate(self.alive)]).double()


def pack_chains(
    features: Features,
    draft_tokens: Tensor,
    vocab_size: int,
    steps: int,
    policy_head: Callable[[Tensor], Tensor] | None = None,
) -> ChainBatch | None:
    """Chains of one micro-batch; None when no response has a second token to draft.

    Args:
        draft_tokens: int64 `[draft_vocab]`, target ids.
        steps: unrolling depth.
        policy_head: gives the target logits where the features hold none, from hidden states `[chains, hidden]`.
    """
    assert not features.hidden.requires_grad, "features must be detached from the policy"
    assert not features.target_logits.requires_grad, "target logits must be detached from the policy"
    mask = features.mask
    starts_at = mask[:, :-1] & mask[:, 1:]  # [batch, seq - 1]: a chain starts at this slot
    rows = starts_at.any(1)
    if not rows.any():
        return None
    starts_at, mask = starts_at[rows], mask[rows]
    slots = torch.arange(starts_at.shape[1], device=mask.device)
    slot_mask = slots <= (starts_at * slots).amax(1, keepdim=True)
    width = int(slot_mask.sum(1).max())
    row, start = starts_at.nonzero(as_tuple=True)
    rank = starts_at.cumsum(1)[row, start] - 1
    per_row = starts_at.sum(1)
    max_chains = int(per_row.max())
    slot_row, slot = slot_mask.nonzero(as_tuple=True)
    slot_ids = (slot_mask.flatten().cumsum(0) - 1).view_as(slot_mask)
    places = row * max_chains + rank
    visible = torch.zeros(len(mask) * max_chains, width, dtype=torch.bool, device=mask.device)
    visible[places] = slots[:width] <= start[:, None]
    in_vocab = torch.zeros(vocab_size, dtype=torch.bool, device=mask.device)
    in_vocab[draft_tokens] = True
    top1 = features.target_top1[rows][row, start + 1]
    if policy_head is None:
        logits = features.target_logits[rows][row, start + 1]
    else:
        logits = policy_head(features.hidden[rows][row, start + 1])
    tokens = features.tokens[rows]
    return ChainBatch(
        hidden=features.hidden[rows][slot_row, slot],
        next_tokens=tokens[slot_row, slot + 1],
        positions=slot,
        slot_places=slot_row * width + slot,
        starts=slot_ids[row, start],
        chain_places=places,
        visible=visible.view(len(mask), max_chains, width),
        alive=_alive(mask, row, start, steps),
        target_probs=logits.float().softmax(-1),
        target_top1=top1,
        target_in_vocab=in_vocab[top1],
        truth=tokens[row, start + 2],
        chains_per_row=per_row.tolist(),
    )


def _alive(mask: Tensor, row: Tensor, start: Tensor, steps: int) -> list[Tensor]:
    padded = F.pad(mask, (0, steps))
    alive = [torch.arange(len(row), device=mask.device)]
    for step in range(1, steps):
        before = alive[-1]
        alive.append(before[padded[row[before], start[before] + step + 1]])
    return alive


def training_time_test(model: DraftModule, batch: ChainBatch) -> Iterator[Tensor]:
    """Unroll the drafter.

    Yields:
        For each step the draft-vocabulary logits `[alive, draft_vocab]` of the chains in `batch.alive[step]`.
    """
    attention = model.attention
    rows_count, max_chains, width = batch.visible.shape
    embedded = model.embed(batch.next_tokens, batch.positions)
    residual, x = model.enter(embedded, model.feed(batch.hidden))
    keys, values = (
        _spread(part, batch.slot_places, rows_count, width) for part in attention.keys_values(x, batch.positions)
    )
    all_keys, all_values = [keys], [values]
    residual, x = residual.index_select(0, batch.starts), x.index_select(0, batch.starts)
    hidden = residual
    for step, alive in enumerate(batch.alive):
        slots, places = batch.starts[alive] + step, batch.chain_places[alive]
        if step:
            hidden = hidden.index_select(0, _positions_within(alive, batch.alive[step - 1]))
            residual, x = model.enter(embedded.index_select(0, slots), hidden)
            own = attention.keys_values(x, batch.positions[slots])
            all_keys.append(_spread(own[0], places, rows_count, max_chains))
            all_values.append(_spread(own[1], places, rows_count, max_chains))
        queries = attention.queries(x, batch.positions[slots])
        queries = _spread(queries, places, rows_count, max_chains)
        attended = chain_attention(queries, all_keys, all_values, batch.visible)
        hidden = model.finish(residual, attended.flatten(0, 1).index_select(0, places))
        yield model.logits(hidden)


def _spread(x: Tensor, places: Tensor, rows: int, width: int) -> Tensor:
    """Packed `[n, ...]` to padded `[rows, width, ...]`, zeros elsewhere."""
    padded = x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, places, x)
    return padded.view(rows, width, *x.shape[1:])


def _positions_within(part: Tensor, whole: Tensor) -> Tensor:
    """Index in sorted `whole` of each element of its subset `part`."""
    return torch.searchsorted(whole, part)


def unrolled_loss(logits: list[Tensor], batch: ChainBatch, counts: Tensor) -> Tensor:
    """Soft cross-entropy to the policy's distribution, each step averaged over `counts[step]` and decayed by step.

    Args:
        counts: float64 `[steps]`: terms at each step over all ranks, so that summed gradients are token-weighted.
    """
    total = logits[0].new_zeros((), dtype=torch.float32)
    for step, (step_logits, alive) in enumerate(zip(logits, batch.alive, strict=True)):
        target = alive + step
        terms = F.cross_entropy(step_logits.float(), batch.target_probs[target], reduction="none")
        weight = STEP_DECAY**step / counts[step].clamp(min=1).float()
        total = total + weight * (terms * batch.target_in_vocab[target]).sum()
    return total


@torch.no_grad()
def unrolled_sums(logits: list[Tensor], batch: ChainBatch, draft_tokens: Tensor) -> Tensor:
    """float64 `[steps + 1, 4]`, to be summed over batches and ranks; read by `metrics_from_sums`.

    Per step: chains, draft = policy's top-1, p(draft), sum of min(p, q). Last row: drafts and accepted tokens when the
    responses are decoded speculatively with k = steps; the sampler is drafter-invariant, so the stored response is
    what would be sampled again and a draft is accepted when it is the stored token.
    """
    sums = torch.zeros(len(logits) + 1, 4, dtype=torch.float64, device=draft_tokens.device)
    matches = torch.zeros(len(batch.starts), len(logits), dtype=torch.bool, device=draft_tokens.device)
    for step, (step_logits, alive) in enumerate(zip(logits, batch.alive, strict=True)):
        target = alive + step
        p, q = batch.target_probs[target], step_logits.float().softmax(-1)
        drafted = q.argmax(-1)
        drafts, counted = draft_tokens[drafted], batch.target_in_vocab[target]
        matches[alive, step] = drafts == batch.truth[target]
        sums[step, 0] = len(alive)
        sums[step, 1] = (drafts == batch.target_top1[target]).sum()
        sums[step, 2] = (p.gather(1, drafted[:, None])[:, 0] * counted).sum()
        sums[step, 3] = (torch.minimum(p, q).sum(-1) * counted).sum()
    accepted = matches.long().cumprod(1).sum(1).tolist()
    sums[-1, :2] = torch.tensor(_replay(accepted, batch.chains_per_row), dtype=torch.float64)
    return sums


def _replay(accepted: list[int], chains_per_row: list[int]) -> tuple[int, int]:
    """Drafts and accepted tokens of decoding: from a chain that got `a` tokens accepted the next one is `a + 1` on."""
    drafts = total = first = 0
    for count in chains_per_row:
        chain = first
        while chain < first + count:
            drafts, total = drafts + 1, total + accepted[chain]
            chain += accepted[chain] + 1
        first += count
    return drafts, total


def metrics_from_sums(sums: Tensor) -> dict[str, float]:
    """`top1_match` (first step), `overlap_pos_i`, `expected_acceptance_pos_i`, `acceptance_length` at k = steps.

    Overlap and expected acceptance are means over chains that live at position i, p on the draft vocabulary, and 0
    where the policy's top-1 is outside it. Zero everywhere when there was nothing to draft.
    """
    steps = sums[:-1] / sums[:-1, :1].clamp(min=1)
    drafts, accepted = sums[-1, 0].item(), sums[-1, 1].item()
    metrics = {"top1_match": steps[0, 1].item(), "acceptance_length": 1 + accepted / max(drafts, 1)}
    for position, row in enumerate(steps.tolist()):
        metrics[f"expected_acceptance_pos_{position}"] = row[2]
        metrics[f"overlap_pos_{position}"] = row[3]
    return metrics
