"""The choice of every request's draft on the device, and the outcomes of each kind of draft.

Once per iteration, `DeviceDrafts` compares all candidate drafts of the last iteration with the sampled tokens, and
chooses among the next ones, without waiting for the device or needing an engine. `kernels` does the same in Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrl.rollout.drafts.text_index import (
    CONTINUED,
    DRAFTERS,
    END,
    LONGEST,
    NOTHING,
    RECENT_TEXT,
    TextIndex,
    until_end,
)

CANDIDATES = 3
"""The drafts that a request may have: stored text, recent text, and the drafter's, which text continues."""
KINDS = NOTHING + 1
NUM_FACTS = 4
PROMPT, NUMBER, LIMIT, START = range(NUM_FACTS)
"""The columns of `Requests.facts`."""
FACTS = "facts"
"""The key of a request's facts in vLLM's `extra_args`."""


class Requests(NamedTuple):
    """The state of all requests, by their slots in the runner; tensors on one device."""

    facts: Tensor
    """[slots, 4] int64: the number of the prompt, see `number_of`; a number from 1 that no other request has; the
    length, prompt included, at which it ends at the latest; the length of its prompt."""
    lengths: Tensor
    """[slots] int32, the tokens of prompt and response together, those of this iteration included."""
    tokens: Tensor
    """[slots, longest sequence] int32, the tokens of prompts and responses."""


class Batch(NamedTuple):
    """The requests of an iteration; tensors of [requests]."""

    slots: Tensor
    """Each occurs once."""
    num_sampled: Tensor
    """int32."""


class Counts(NamedTuple):
    """The outcomes of each kind of draft, verified or not, as int64 arrays."""

    seen: NDArray[np.int64]
    """[kinds, k]: how often the token at a position, drafted or not, was compared, those before it being right."""
    right: NDArray[np.int64]
    """[kinds, k]: how often it was the sampled token."""
    offered: NDArray[np.int64]
    """[kinds]: how often each kind was the best that there was for a request with room for a draft; the last where
    there was nothing."""


class DeviceDrafts:
    """Chooses between text drafts and the drafter's, and counts how often each kind is right, in PyTorch."""

    def __init__(self, num_slots: int, k: int, device: torch.device | str = "cpu") -> None:
        """Begin without text, with room for `num_slots` requests at once and drafts of up to `k` tokens."""
        self.k = k
        self.device = torch.device(device)
        self.index = TextIndex([], device)
        self.expected = torch.zeros(k + 1, KINDS, device=device)
        """The expected accepted tokens of a draft, by its length and kind; below 0 for no draft."""
        self.behind = torch.zeros(k + 1, k + 1, KINDS, device=device)
        """The same for a drafter's draft, by its length, the drafter's passes, and the kind of continuing text."""
        self.expect(np.zeros((k + 1, NOTHING)), recalls=True)
        self._column, self._back = torch.arange(k, device=device), torch.arange(LONGEST, device=device)
        # The prediction for each slot: the draft, the request it is for, and that request's length.
        self.made_at = torch.full((num_slots, 2), -1, dtype=torch.int64, device=device)
        self.tokens = torch.full((num_slots, CANDIDATES, k), END, dtype=torch.int64, device=device)
        self.kinds = torch.full((num_slots, CANDIDATES), NOTHING, dtype=torch.int64, device=device)
        self.has_drafter = False
        """Whether there is a drafter, even in iterations without its drafts."""
        self.sources = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """The place in `SOURCES` of the source of each slot's next draft."""
        self.lengths = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """The number of tokens of that draft, padding not counted."""
        self.begin(())

    def begin(self, stop_tokens: Sequence[int]) -> None:
        """Set all counters to zero, for a generation whose responses end with any of these tokens."""
        self.by_kind = torch.zeros(KINDS, 2, self.k, dtype=torch.int64, device=self.device)
        self.offered = torch.zeros(KINDS, dtype=torch.int64, device=self.device)
        self.stop_tokens = torch.tensor([*stop_tokens], dtype=torch.int64, device=self.device)

    def expect(self, accepted: NDArray[np.float64], recalls: bool) -> None:
        """Set what decides between a request's drafts.

        Args:
            accepted: [k + 1, kinds but `NOTHING`], the expected accepted tokens of a draft by its length.
            recalls: Whether recent text may be drafted.
        """
        table = np.pad(accepted, ((0, 0), (0, 1)), constant_values=-1.0)
        if not recalls:
            table[:, RECENT_TEXT:DRAFTERS] = -2.0
        self.expected.copy_(torch.from_numpy(table))
        behind = np.repeat(table[:, DRAFTERS], (self.k + 1) * KINDS).reshape(self.behind.shape)
        for passes in range(1, self.k):
            all_right = table[passes, DRAFTERS] - table[passes - 1, DRAFTERS]
            text = table[1 : self.k + 1 - passes].clip(min=0)
            behind[passes + 1 :, passes] = table[passes, DRAFTERS] + all_right * text
        self.behind.copy_(torch.from_numpy(behind))

    def counts(self) -> Counts:
        """All counters since `begin`; this waits for the device."""
        seen, right = self.by_kind.cpu().numpy().copy().transpose(1, 0, 2)
        return Counts(seen, right, self.offered.cpu().numpy().copy())

    def observe(self, requests: Requests, batch: Batch) -> None:
        """Count the outcomes of the predictions made for these requests in their last iteration."""
        column, slots, num_sampled = self._column, batch.slots.long(), batch.num_sampled.long()
        before = requests.lengths[slots].long() - num_sampled
        at = (before[:, None] + column).clamp(max=requests.tokens.shape[1] - 1)
        sampled = requests.tokens[slots[:, None], at].long()
        made_at, predicted = self.made_at[slots], self.tokens[slots]
        counts = (made_at[:, 0] == requests.facts[slots, NUMBER]) & (made_at[:, 1] == before)
        # [requests, candidates, k] from here on
        shown = (predicted != END) & (counts[:, None] & (column < num_sampled[:, None]))[:, None]
        right = (shown & (predicted == sampled[:, None])).long().cumprod(2)
        seen = shown & torch.cat((torch.ones_like(right[:, :, :1]), right[:, :, :-1]), 2).bool()
        both = torch.stack((seen, right), 2).flatten(0, 1)
        self.by_kind.index_add_(0, self.kinds[slots].flatten(), both)

    def choose(self, requests: Requests, batch: Batch, drafter: Tensor | None, length: int) -> Tensor:
        """Choose the next draft of each request, int64 [requests, k], of which `length` tokens will be verified.

        It is the candidate of the kind with the most expected accepted tokens. Places without a candidate token hold
        the request's last token, which the policy can read and which counts as no draft.

        Args:
            drafter: [requests, any number up to k] int64, the drafter's drafts, `END` where it has none; None if it
                made none.
        """
        slots = batch.slots.long()
        facts, lengths = requests.facts[slots], requests.lengths[slots]
        back = lengths.long()[:, None] - 1 - self._back
        tokens = requests.tokens[slots[:, None], back.clamp(min=0)].long()
        last = torch.where(back >= facts[:, START, None], tokens, END)
        found = self.index.find(last, facts[:, PROMPT])
        candidates = torch.full((len(last), CANDIDATES, self.k), END, dtype=torch.int64, device=self.device)
        candidates[:, :-1] = self.index.ahead(found.places, self.k)
        length, passes = max(length, 1), 0 if drafter is None else drafter.shape[1]
        worth_behind = self.expected[0, DRAFTERS]
        if drafter is not None:
            candidates[:, -1], worth_behind = self._with_text(drafter, last, facts[:, PROMPT], length)
        # Verification adds a token after a draft, which must fit too. A response may be computed for one more iteration
        # before vLLM learns that it has ended: nothing is predicted for it.
        has_ended = (last[:, :1] == self.stop_tokens).any(1)
        room = torch.where(has_ended, 0, facts[:, LIMIT] - lengths - 1)
        candidates = torch.where(self._column < room[:, None, None], candidates, END)
        is_continued = (candidates[:, -1:, passes:] != END).any(2)
        kinds = torch.cat((found.kinds, torch.where(is_continued, CONTINUED, DRAFTERS)), 1)
        kinds = torch.where(candidates[:, :, 0] == END, NOTHING, kinds)
        worth = self.expected[length][kinds]
        worth[:, -1] = torch.where(kinds[:, -1] == CONTINUED, worth_behind, worth[:, -1])
        chosen = worth.argmax(1)

        self.made_at[slots] = torch.stack((facts[:, NUMBER], lengths.long()), 1)
        self.tokens[slots], self.kinds[slots] = candidates, kinds
        kind = kinds.gather(1, chosen[:, None])[:, 0]
        if self.offers(drafter):
            self.offered.index_add_(0, kind, (room > 0).long())
        drafts = candidates.gather(1, chosen[:, None, None].expand(-1, 1, self.k))[:, 0]
        self.sources[slots] = (kind >= RECENT_TEXT).int() + (kind >= DRAFTERS).int() + (kind == CONTINUED).int()
        self.lengths[slots] = (drafts != END).sum(1, dtype=torch.int32)
        return torch.where(drafts == END, tokens[:, :1], drafts)

    def _with_text(self, drafter: Tensor, last: Tensor, prompts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        # The drafter's drafts continued by text, and the expected accepted tokens of both together.
        found = self.index.find(torch.cat((drafter.flip(1), last), 1)[:, :LONGEST], prompts)
        worth = self.behind[length, drafter.shape[1]][found.kinds]
        best = worth.argmax(1, keepdim=True)
        # Only where some of the text will be verified: otherwise it must not count as the drafter's.
        places = found.places if length > drafter.shape[1] else torch.zeros_like(found.places)
        text = self.index.ahead(places.gather(1, best)[:, 0], self.k - drafter.shape[1])
        return until_end(torch.cat((drafter, text), 1)), worth.gather(1, best)[:, 0]

    def offers(self, drafter: Tensor | None) -> bool:
        """Whether an iteration counts in `Counts.offered`: not while the drafter, if there is one, is off."""
        return drafter is not None or not self.has_drafter
