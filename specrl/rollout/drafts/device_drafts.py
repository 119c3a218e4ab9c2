"""The choice of every request's draft, and the counters of all drafts, on the device.

`DeviceDrafts` is asked once an iteration: it counts what became of the drafts before, and chooses among those that
there may be next. It runs a fixed number of operations for any batch, waits for nothing, and needs no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrl.rollout.drafts.acceptance import SourceCounts, SpeculationStats
from specrl.rollout.drafts.text_index import (
    DRAFTERS,
    END,
    LONGEST,
    NOTHING,
    OWN,
    RECENT_TEXT,
    SOURCE_OF_KIND,
    SOURCES,
    TextIndex,
    until_end,
)

CANDIDATES = 4
"""The drafts that a request may have: text of its own seed, stored text, recent text, and the drafter's."""
KINDS = NOTHING + 1


class Batch(NamedTuple):
    """What an iteration has made of the requests of a batch; all tensors are [requests] on one device."""

    slots: Tensor
    """int64, the rows of the requests in all that is kept from one iteration to the next; each occurs once."""
    rows: Tensor
    """int64, the places of the requests in this generation; 0 for a request that is not counted by itself."""
    prompts: Tensor
    """int64, the numbers of their prompts; see `TextIndex.find`."""
    seeds: Tensor
    """int64."""
    prompt_lengths: Tensor
    lengths: Tensor
    """The tokens of prompt and response together, those of this iteration included."""
    limits: Tensor
    """The number of tokens, prompt included, at which each response ends at the latest."""
    num_sampled: Tensor
    num_rejected: Tensor
    """The drafted places that were computed in vain; together with `num_sampled` one more than were verified."""


class Sums(NamedTuple):
    """The counters on the device; see `Counts`."""

    by_request: Tensor
    by_kind: Tensor
    """[kinds, 4, k]: drafted, accepted, seen, right."""
    offered: Tensor


@dataclass
class Counts:
    """Sums over drafts, as int64 arrays."""

    by_request: NDArray[np.int64]
    """[requests + 1, sources, 3]: drafts, drafted tokens and accepted tokens; the first row is of other requests."""
    drafted: NDArray[np.int64]
    """[kinds, k]: the drafts of each kind that reached a position, and in `accepted` those whose token was right."""
    accepted: NDArray[np.int64]
    seen: NDArray[np.int64]
    """[kinds, k]: how often the token at a position was compared, those before it being right, whether it was drafted
    or might have been; in `right` how often it was the one."""
    right: NDArray[np.int64]
    offered: NDArray[np.int64]
    """[kinds]: how often each kind was the best that there was for a request; the last where there was nothing."""

    def stats(self, decode_steps: int) -> SpeculationStats:
        """Return the counters of all drafts.

        Args:
            decode_steps: The number of iterations, which is not counted here.
        """
        drafted, accepted = self.drafted.sum(0), self.accepted.sum(0)
        reached = int((drafted > 0).sum())
        sums = self.by_request.sum(0)
        drafts, draft_tokens, accepted_tokens = sums.sum(0).tolist()
        return SpeculationStats(
            num_drafts=drafts,
            num_draft_tokens=draft_tokens,
            num_accepted_tokens=accepted_tokens,
            accepted_per_pos=tuple(accepted[:reached].tolist()),
            decode_steps=decode_steps,
            drafted_per_pos=tuple(drafted[:reached].tolist()),
            by_source={
                source: SourceCounts(*row.tolist()) for source, row in zip(SOURCES, sums, strict=True) if row[0]
            },
        )

    def of_request(self, row: int) -> dict[str, SourceCounts]:
        """Return the counters of one request's drafts by source, for sources that it had drafts of."""
        return {
            source: SourceCounts(*counts.tolist())
            for source, counts in zip(SOURCES, self.by_request[row], strict=True)
            if counts[0]
        }


class DeviceDrafts:
    """Chooses drafts among text and the drafter's, and counts them."""

    def __init__(self, num_slots: int, k: int, device: torch.device | str = "cpu") -> None:
        """Begin without text.

        Args:
            num_slots: The number of requests that can run at once.
            k: The longest draft, in tokens.
        """
        self.k = k
        self.device = torch.device(device)
        self.index = TextIndex([], device)
        self._expected = torch.zeros(k + 1, KINDS, device=device)
        """The accepted tokens that a draft is expected to bring, by its length and kind; below 0 for no draft."""
        self.expect(np.zeros((k + 1, NOTHING)), recalls=True)
        self._source_of = torch.tensor(SOURCE_OF_KIND, device=device)
        self._column, self._back = torch.arange(k, device=device), torch.arange(LONGEST, device=device)
        self._candidates = torch.arange(CANDIDATES, device=device)
        # What was predicted for the request of each slot: for which request, at which length, and what was chosen.
        self._made_at = torch.full((num_slots, 2), -1, dtype=torch.int64, device=device)
        self._tokens = torch.full((num_slots, CANDIDATES, k), END, dtype=torch.int64, device=device)
        self._kinds = torch.full((num_slots, CANDIDATES), NOTHING, dtype=torch.int64, device=device)
        self._chosen = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.has_drafter = False
        """Whether there is a drafter, in iterations without its drafts too."""
        self.sources = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """The place in `SOURCES` of the source of each slot's next draft."""
        self.lengths = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """The number of tokens of that draft, padding not counted."""
        self.begin(0)

    def begin(self, num_requests: int, stop_tokens: Sequence[int] = ()) -> None:
        """Set all counters to zero, for a generation of so many requests."""
        sizes = (num_requests + 1, len(SOURCES), 3), (KINDS, 4, self.k), (KINDS,)
        self._sums = Sums(*(torch.zeros(size, dtype=torch.int64, device=self.device) for size in sizes))
        self.log: list[Tensor] | None = None
        """Where the drafts of each iteration are noted, [requests, 4]: row, tokens before the draft, those drafted, and
        those accepted; None to note nothing. A request without a draft has none drafted."""
        self._ended = torch.zeros(num_requests + 1, dtype=torch.bool, device=self.device)
        self._stop_tokens = torch.tensor([*stop_tokens], dtype=torch.int64, device=self.device)

    def expect(self, accepted: NDArray[np.float64], recalls: bool) -> None:
        """Say what decides between the drafts that a request may have; no other text goes before that of its own seed.

        Args:
            accepted: [k + 1, kinds but `NOTHING`], the accepted tokens that a draft should bring, by its length.
            recalls: Whether recent text may be drafted.
        """
        table = np.pad(accepted, ((0, 0), (0, 1)), constant_values=-1.0)
        if not recalls:
            table[:, RECENT_TEXT:DRAFTERS] = -2.0
        table[:, OWN] = table[:, :DRAFTERS].max(1)
        self._expected.copy_(torch.from_numpy(table))

    def counts(self) -> Counts:
        """Return all counters since `begin`; this waits for the device."""
        by_request, by_kind, offered = (values.cpu().numpy().copy() for values in self._sums)
        drafted, accepted, seen, right = by_kind.transpose(1, 0, 2)
        return Counts(by_request, drafted, accepted, seen, right, offered)

    def observe(self, batch: Batch, all_tokens: Tensor) -> None:
        """Count what became of the predictions that were made for these requests in their last iteration.

        Args:
            all_tokens: [slots, longest sequence], the tokens of prompts and responses.
        """
        column = self._column
        before = batch.lengths.long() - batch.num_sampled
        at = (before[:, None] + column).clamp(max=all_tokens.shape[1] - 1)
        sampled = all_tokens[batch.slots[:, None], at].long()
        made_at, predicted = self._made_at[batch.slots], self._tokens[batch.slots]
        kinds, chosen = self._kinds[batch.slots], self._chosen[batch.slots]
        counts = (made_at[:, 0] == batch.rows) & (made_at[:, 1] == before) & ~self._ended[batch.rows]
        # [requests, candidates, k] from here on
        is_token = (predicted != END) & counts[:, None, None]
        shown = is_token & (column < batch.num_sampled[:, None])[:, None]
        right = (shown & (predicted == sampled[:, None])).long().cumprod(2)
        seen = shown & torch.cat((torch.ones_like(right[:, :, :1]), right[:, :, :-1]), 2).bool()
        verified = (batch.num_sampled + batch.num_rejected - 1)[:, None]
        is_chosen = chosen[:, None] == self._candidates
        drafted = is_token & is_chosen[:, :, None] & (column < verified)[:, None]
        accepted = right * drafted
        both = torch.stack((drafted, accepted, seen, right), 2).flatten(0, 1)
        self._sums.by_kind.index_add_(0, kinds.flatten(), both)

        lengths = drafted.sum((1, 2))
        sums = torch.stack(((lengths > 0).long(), lengths, accepted.sum((1, 2))), 1)
        source = self._source_of[(kinds * is_chosen).sum(1)]
        self._sums.by_request.view(-1, 3).index_add_(0, batch.rows * len(SOURCES) + source, sums)
        if self.log is not None:
            self.log.append(torch.cat((torch.stack((batch.rows, before), 1), sums[:, 1:]), 1))
        # A response may be computed for one more iteration before vLLM learns that it has ended.
        last = all_tokens[batch.slots, (batch.lengths - 1).long()]
        stops = (last[:, None] == self._stop_tokens).any(1) & (batch.num_sampled > 0)
        self._ended[batch.rows] |= stops | (batch.lengths >= batch.limits)
        self._ended[0].fill_(False)

    def choose(self, batch: Batch, all_tokens: Tensor, drafter: Tensor | None, length: int) -> Tensor:
        """Return the next draft of each request, int64 [requests, k], of which `length` tokens will be verified.

        It is the candidate of the kind that is expected to bring most. Where no candidate has a token, the request's
        last token stands, which counts as no draft: the policy must be able to read it.

        Args:
            drafter: [requests, any number up to k] int64, the drafter's drafts, `END` where it has none; None if it
                made none.
        """
        back = batch.lengths.long()[:, None] - 1 - self._back
        tokens = all_tokens[batch.slots[:, None], back.clamp(min=0)].long()
        last = torch.where(back >= batch.prompt_lengths[:, None], tokens, END)
        found = self.index.find(last, batch.prompts, batch.seeds, batch.lengths - batch.prompt_lengths)
        candidates = torch.full((len(last), CANDIDATES, self.k), END, dtype=torch.int64, device=self.device)
        candidates[:, :-1] = self.index.ahead(found.places, self.k)
        if drafter is not None:
            candidates[:, -1, : drafter.shape[1]] = until_end(drafter)
        # Verification adds a token after a draft, and that one must fit.
        room = (batch.limits - batch.lengths - 1)[:, None, None]
        candidates = torch.where(self._column < room, candidates, END)
        kinds = torch.cat((found.kinds, torch.full_like(found.kinds[:, :1], DRAFTERS)), 1)
        kinds = torch.where(candidates[:, :, 0] == END, NOTHING, kinds)
        chosen = self._expected[max(length, 1)][kinds].argmax(1)

        self._made_at[batch.slots] = torch.stack((batch.rows, batch.lengths.long()), 1)
        self._tokens[batch.slots], self._kinds[batch.slots], self._chosen[batch.slots] = candidates, kinds, chosen
        kind = kinds.gather(1, chosen[:, None])[:, 0]
        if drafter is not None or not self.has_drafter:  # else it might have had a draft for each request
            self._sums.offered.index_add_(0, kind, torch.ones_like(kind))
        drafts = candidates.gather(1, chosen[:, None, None].expand(-1, 1, self.k))[:, 0]
        self.sources[batch.slots] = self._source_of[kind].int()
        self.lengths[batch.slots] = (drafts != END).sum(1, dtype=torch.int32)
        return torch.where(drafts == END, tokens[:, :1], drafts)
