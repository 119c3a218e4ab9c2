"""The chains of a micro-batch on which a drafter is trained (see `ttt.py`), packed without padding, in parts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from specrl.training.drafter.attention import Spans
from specrl.training.features import NOT_SAMPLED, Features

MAX_CHAINS = 1024
"""The largest number of chains in a part, all of whose logits and activations are in memory at once.

It gives a GPU's matrix products enough rows, and a micro-batch of the default size is one part."""


@dataclass(frozen=True)
class Part:
    chains: slice
    """The place of the part's chains among those of the micro-batch."""
    slots: Tensor
    """int64 `[keys]`: the slots that chains see at their start, row by row."""
    spans: Spans
    """The part's chains of each row as queries, and `slots` as keys: the last chain sees all slots of its row."""
    alive: list[Tensor]
    """The chains of this part in each list of `ChainBatch.alive`, without steps at which none of them is alive."""

    @property
    def size(self) -> int:
        return int(self.chains.stop - self.chains.start)


@dataclass(frozen=True)
class ChainBatch:
    """The chains of one micro-batch, packed; rows without a chain are left out.

    The slots of a row are consecutive, and so are the chains of a response: the slot of chain n at step j is
    `starts[n] + j`, and its target is the step-0 target of chain `n + j`.
    """

    features: Features
    slot_rows: Tensor
    """int64 `[slots]`: the row of each slot in `features`."""
    columns: Tensor
    """int64 `[slots]`: the column of each slot in `features`."""
    positions: Tensor
    """int64 `[slots]`: the position of each slot in its sequence, which begins before the first column of a window."""
    starts: Tensor
    """int64 `[chains]`: the index of the slot at which the chain starts."""
    alive: list[Tensor]
    """For each step, int64 `[alive]`: the chains with a target at it; all of them have one at the step before."""
    alive_on_host: list[list[int]]
    target_top1: Tensor
    """int64 `[chains]`: the policy's most likely token for each chain's step-0 target."""
    target_in_vocab: Tensor
    """bool `[chains]`: whether `target_top1` is in the draft vocabulary; other targets do not count in the loss, nor do
    those that the policy did not sample."""
    truth: Tensor
    """int64 `[chains]`: the response's own token at each chain's step-0 target."""
    chains_per_row: list[int]
    """The number of chains in each row that has any."""
    slots_per_row: list[int]
    """The number of slots in each of these rows; the last one is where its last chain starts."""

    @property
    def sampled(self) -> Tensor:
        """Whether each chain's step-0 target was sampled by the policy, bool `[chains]`."""
        return self.target_top1 != NOT_SAMPLED

    def loss_counts(self) -> Tensor:
        """Count the terms of the loss at each step, float64 `[steps]`."""
        return torch.stack([self.target_in_vocab[rows + j].sum() for j, rows in enumerate(self.alive)]).double()

    def spans(self) -> Spans:
        ends = tuple(accumulate(self.slots_per_row, initial=0))
        return Spans(ends, ends, self.starts.device)

    def parts(self) -> Iterator[Part]:
        """Yield all chains in their order, in parts of at most MAX_CHAINS chains."""
        for start in range(0, len(self.starts), MAX_CHAINS):
            yield self._part(start, min(start + MAX_CHAINS, len(self.starts)))

    def _part(self, start: int, stop: int) -> Part:
        queries, keys, slots = [0], [0], []
        chain = place = 0
        for chains, length in zip(self.chains_per_row, self.slots_per_row, strict=True):
            first, last = max(start, chain), min(stop, chain + chains)
            if first < last:
                seen = length - (chain + chains - last)
                slots.append(torch.arange(place, place + seen, device=self.starts.device))
                queries.append(queries[-1] + last - first)
                keys.append(keys[-1] + seen)
            chain, place = chain + chains, place + length
        own = [
            alive[bisect_left(numbers, start) : bisect_left(numbers, stop)]
            for alive, numbers in zip(self.alive, self.alive_on_host, strict=True)
        ]
        spans = Spans(tuple(queries), tuple(keys), self.starts.device)
        return Part(slice(start, stop), torch.cat(slots), spans, [alive for alive in own if len(alive)])


def pack_chains(features: Features, draft_tokens: Tensor, vocab_size: int, steps: int) -> ChainBatch | None:
    """Find the chains of one micro-batch, each with `steps` steps; None if no response has a second token to draft.

    Features are not copied. The host waits for the mask, and computes the rest while the device continues.
    """
    assert not features.hidden.requires_grad, "features must be detached from the policy"
    device, mask = features.mask.device, features.mask.cpu()
    starts_at = mask[:, :-1] & mask[:, 1:]  # [batch, seq - 1]: a chain starts at this slot
    (rows,) = starts_at.any(1).nonzero(as_tuple=True)
    if not len(rows):
        return None
    starts_at, mask = starts_at[rows], mask[rows]
    slots = torch.arange(starts_at.shape[1])
    slot_mask = slots <= (starts_at * slots).amax(1, keepdim=True)
    row, start = starts_at.nonzero(as_tuple=True)
    slot_row, slot = slot_mask.nonzero(as_tuple=True)
    slot_ids = (slot_mask.flatten().cumsum(0) - 1).view_as(slot_mask)
    alive = _alive(mask, row, start, steps)
    source, target = rows[row].to(device), (start + 1).to(device)
    slot_source, slot = rows[slot_row].to(device), slot.to(device)
    top1 = features.target_top1[source, target]
    in_vocab = torch.zeros(vocab_size + 1, dtype=torch.bool, device=device)
    in_vocab[draft_tokens] = True
    return ChainBatch(
        features=features,
        slot_rows=slot_source,
        columns=slot,
        positions=slot + features.starts[slot_source],
        starts=slot_ids[row, start].to(device),
        alive=[step.to(device) for step in alive],
        alive_on_host=[step.tolist() for step in alive],
        target_top1=top1,
        target_in_vocab=in_vocab[top1],  # NOT_SAMPLED indexes the last entry, which belongs to no token
        truth=features.tokens[source, target + 1],
        chains_per_row=starts_at.sum(1).tolist(),
        slots_per_row=slot_mask.sum(1).tolist(),
    )


def _alive(mask: Tensor, row: Tensor, start: Tensor, steps: int) -> list[Tensor]:
    padded = F.pad(mask, (0, steps))
    alive = [torch.arange(len(row))]
    for step in range(1, steps):
        before = alive[-1]
        alive.append(before[padded[row[before], start[before] + step + 1]])
    return alive
