"""The chains of a micro-batch that a drafter is trained on (see `ttt.py`), packed without padding and cut in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specrl.training.features import Features

MAX_CHAINS = 1024
"""The largest number of chains in a part, all of whose logits and activations are in memory at once.

It gives a GPU's matrix products enough rows, and a micro-batch of the default size is one part."""


@dataclass(frozen=True)
class Part:
    """Chains that are trained together: all of some rows, or some of one row."""

    chains: slice
    """The place of the part's chains among those of the micro-batch."""
    rows: slice
    """The place of the part's rows among those of the micro-batch."""
    places: Tensor
    """int64 `[chains of the part]`: the place of each in the padded `[rows, columns]` layout, flattened."""
    visible: Tensor
    """bool `[rows, columns, width]`: the slots that each chain sees; no chain of the part sees one beyond width."""
    alive: list[Tensor]
    """The chains of this part in each list of `ChainBatch.alive`, without steps at which none of them is alive."""


@dataclass(frozen=True)
class ChainBatch:
    """The chains of one micro-batch, packed; rows without a chain are left out.

    Rows of the same prompt share its slots. The other slots of a row are consecutive, and so are the chains of a
    response: the slot of chain n at step j is `starts[n] + j`, and its target is the step-0 target of chain `n + j`.
    """

    features: Features
    slot_rows: Tensor
    """int64 `[slots]`: the row of each slot in `features`."""
    columns: Tensor
    """int64 `[slots]`: the column of each slot in `features`."""
    positions: Tensor
    """int64 `[slots]`: the position of each slot in its sequence, which begins before the first column of a window."""
    own_places: Tensor
    """int64 `[slots]`: the place of each slot in the padded `[rows, width]` layout, flattened; for one that rows share,
    the place in the first of them."""
    slot_places: Tensor
    """int64 `[places]`: the places in the padded `[rows, width]` layout, flattened, that have a slot."""
    slot_of: Tensor
    """int64 `[places]`: the slot at each of them; one that rows share is at several."""
    width: int
    """The largest number of slots in a row."""
    starts: Tensor
    """int64 `[chains]`: the index of the slot at which the chain starts."""
    chain_rows: Tensor
    """int64 `[chains]`: the number of the chain's row among those that have any."""
    order: Tensor
    """int64 `[chains]`: the number of the chain among those of its row, from 0."""
    alive: list[Tensor]
    """For each step, int64 `[alive]`: the chains that have a target at it, all of which have one at the step before."""
    target_top1: Tensor
    """int64 `[chains]`: the policy's most likely token for each chain's step-0 target."""
    target_in_vocab: Tensor
    """bool `[chains]`: whether `target_top1` is in the draft vocabulary; other targets do not count in the loss."""
    truth: Tensor
    """int64 `[chains]`: the response's own token at each chain's step-0 target."""
    chains_per_row: list[int]
    """The number of chains in each row that has any."""

    def loss_counts(self) -> Tensor:
        """Return the number of terms of the loss at each step, float64 `[steps]`."""
        return torch.stack([self.target_in_vocab[rows + j].sum() for j, rows in enumerate(self.alive)]).double()

    def parts(self) -> Iterator[Part]:
        """Yield all chains in their order, in parts of at most MAX_CHAINS chains each, padding included."""
        size = max(1, MAX_CHAINS // max(self.chains_per_row))
        first = 0
        for row in range(0, len(self.chains_per_row), size):
            rows = slice(row, min(row + size, len(self.chains_per_row)))
            counts = self.chains_per_row[rows]
            stop = first + sum(counts)
            for start in range(first, stop, MAX_CHAINS):  # several only where one row alone has too many
                chains = slice(start, min(start + MAX_CHAINS, stop))
                yield self._part(rows, chains, min(max(counts), chains.stop - start))
            first = stop

    def _part(self, rows: slice, chains: slice, columns: int) -> Part:
        slots, order = self.starts[chains], self.order[chains]
        places = (self.chain_rows[chains] - rows.start) * columns + order - order[0]
        start = self.columns[slots]
        width = int(start.max()) + 1
        visible = torch.zeros((rows.stop - rows.start) * columns, width, dtype=torch.bool, device=start.device)
        visible[places] = torch.arange(width, device=start.device) <= start[:, None]
        alive = [step[(step >= chains.start) & (step < chains.stop)] for step in self.alive]
        return Part(chains, rows, places, visible.view(-1, columns, width), [step for step in alive if len(step)])


def pack_chains(features: Features, draft_tokens: Tensor, vocab_size: int, steps: int) -> ChainBatch | None:
    """Return the chains of one micro-batch, or None when no response has a second token to draft.

    Features are not copied.

    Args:
        draft_tokens: int64 `[draft_vocab]`: the target ids of the draft vocabulary.
        vocab_size: The number of tokens of the policy.
        steps: The number of steps that each chain is unrolled for.
    """
    assert not features.hidden.requires_grad, "features must be detached from the policy"
    assert not features.targets.requires_grad, "targets must be detached from the policy"
    mask = features.mask
    starts_at = mask[:, :-1] & mask[:, 1:]  # [batch, seq - 1]: a chain starts at this slot
    (rows,) = starts_at.any(1).nonzero(as_tuple=True)
    if not len(rows):
        return None
    starts_at, mask = starts_at[rows], mask[rows]
    slots = torch.arange(starts_at.shape[1], device=mask.device)
    slot_mask = slots <= (starts_at * slots).amax(1, keepdim=True)
    width = int(slot_mask.sum(1).max())
    row, start = starts_at.nonzero(as_tuple=True)
    own = slot_mask.clone()
    shared = _shared_prompts(features, rows, mask)
    for other, (_, length) in shared.items():
        own[other, :length] = False
    slot_row, slot = own.nonzero(as_tuple=True)
    slot_ids = (own.flatten().cumsum(0) - 1).view_as(own)
    for other, (leader, length) in shared.items():
        slot_ids[other, :length] = slot_ids[leader, :length]
    place_row, place = slot_mask.nonzero(as_tuple=True)
    in_vocab = torch.zeros(vocab_size, dtype=torch.bool, device=mask.device)
    in_vocab[draft_tokens] = True
    top1 = features.target_top1[rows[row], start + 1]
    return ChainBatch(
        features=features,
        slot_rows=rows[slot_row],
        columns=slot,
        positions=slot if features.starts is None else slot + features.starts[rows[slot_row]],
        own_places=slot_row * width + slot,
        slot_places=place_row * width + place,
        slot_of=slot_ids[slot_mask],
        width=width,
        starts=slot_ids[row, start],
        chain_rows=row,
        order=starts_at.cumsum(1)[row, start] - 1,
        alive=_alive(mask, row, start, steps),
        target_top1=top1,
        target_in_vocab=in_vocab[top1],
        truth=features.tokens[rows[row], start + 2],
        chains_per_row=starts_at.sum(1).tolist(),
    )


def _shared_prompts(features: Features, rows: Tensor, mask: Tensor) -> dict[int, tuple[int, int]]:
    """Return the rows whose first slots are those of a row before, with that row and their number.

    The slots are those of the whole prompt but its last token, beside which the response's first token stands. The
    hidden states are compared too: those of the same prompt differ if they come from different passes.

    Args:
        rows: int64 `[rows]`: the rows of `features` that have chains.
        mask: Their rows of `features.mask`.
    """
    leaders: dict[tuple[int, ...], int] = {}
    found: dict[int, tuple[int, int]] = {}
    starts = [0] * len(features.mask) if features.starts is None else features.starts.tolist()
    for row, (source, first) in enumerate(zip(rows.tolist(), mask.int().argmax(1).tolist(), strict=True)):
        if starts[source]:
            continue  # a window, which lacks the beginning
        leader = leaders.setdefault(tuple(features.tokens[source, : first + 1].tolist()), row)
        here, there = features.hidden[source, :first], features.hidden[int(rows[leader]), :first]
        if leader != row and torch.equal(here, there):
            found[row] = leader, first
    return found


def _alive(mask: Tensor, row: Tensor, start: Tensor, steps: int) -> list[Tensor]:
    padded = F.pad(mask, (0, steps))
    alive = [torch.arange(len(row), device=mask.device)]
    for step in range(1, steps):
        before = alive[-1]
        alive.append(before[padded[row[before], start[before] + step + 1]])
    return alive
