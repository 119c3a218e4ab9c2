"""The outcomes of drafts, and the counters by which speculation is judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

DRAFTER, REPLAY, RECENT, CONTINUED_DRAFT = "drafter", "replay", "recent", "continued"
"""The names of draft sources: vLLM's proposer, text stored for the prompt, recent responses to any prompt, and the
proposer with text behind its own tokens."""
OWN_TEXT = "own"
"""The source of text compared in passes over text of a request's own seed; see `own_text`."""


class VerifiedDraft(NamedTuple):
    """A verified draft."""

    context: int
    """The number of tokens before the draft, prompt included."""
    drafted: int
    accepted: int
    source: str = DRAFTER


class SourceCounts(NamedTuple):
    """Counters of one source's drafts."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True)
class SpeculationStats:
    """Counters of one or more generations; `a + b` merges them.

    A draft is one proposal of up to k tokens for one request in one iteration, or text of the request's own seed read
    in one pass. `accepted_per_pos[i]` counts the drafts whose token i was accepted, `drafted_per_pos[i]` those with a
    token i; both exclude passes over own text. `decode_steps` counts these passes, and engine iterations in which at
    least one request was decoding.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    decode_steps: int = 0
    drafted_per_pos: tuple[int, ...] = ()
    by_source: Mapping[str, SourceCounts] = field(default_factory=dict)

    @classmethod
    def of(cls, drafts: Iterable[VerifiedDraft], decode_steps: int = 0) -> SpeculationStats:
        """Count drafts of at least one token each, in a single pass because a large step has millions."""
        alike = Counter((draft.source, draft.drafted, draft.accepted) for draft in drafts)
        parts = []
        for (source, drafted, accepted), number in alike.items():
            counts = SourceCounts(number, number * drafted, number * accepted)
            columns = 0 if source == OWN_TEXT else drafted
            per_pos = tuple(number * (i < accepted) for i in range(columns))
            parts.append(cls(*counts, per_pos, 0, (number,) * columns, {source: counts}))
        return replace(cls.merge(parts), decode_steps=decode_steps)

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        by_source = dict(self.by_source)
        for name, counts in other.by_source.items():
            by_source[name] = SourceCounts(*map(sum, zip(by_source.get(name, SourceCounts()), counts, strict=True)))
        return SpeculationStats(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            _sum_per_pos(self.accepted_per_pos, other.accepted_per_pos),
            self.decode_steps + other.decode_steps,
            _sum_per_pos(self.drafted_per_pos, other.drafted_per_pos),
            by_source,
        )

    @staticmethod
    def merge(parts: Iterable[SpeculationStats]) -> SpeculationStats:
        """Add any number of them."""
        return sum(parts, SpeculationStats())

    @property
    def acceptance_length(self) -> float:
        """The mean tokens per draft, bonus token included: 1 + accepted / drafts, without passes over own text; 1
        without drafts."""
        drafts = self._drafts
        return 1 + drafts.num_accepted_tokens / drafts.num_drafts if drafts.num_drafts else 1.0

    @property
    def _drafts(self) -> SourceCounts:
        own = self.by_source.get(OWN_TEXT, SourceCounts())
        totals = self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens
        return SourceCounts(*(total - read for total, read in zip(totals, own, strict=True)))

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens over drafted tokens, without passes over own text; 0 without drafts."""
        drafts = self._drafts
        return drafts.num_accepted_tokens / drafts.num_draft_tokens if drafts.num_draft_tokens else 0.0

    @property
    def acceptance_rate_per_pos(self) -> tuple[float, ...]:
        """For each position, the share of the drafts with a token there whose token was accepted."""
        return tuple(
            accepted / drafted for accepted, drafted in zip(self.accepted_per_pos, self.drafted_per_pos, strict=True)
        )


def over_engines(parts: Sequence[SpeculationStats]) -> SpeculationStats:
    """Add the counters of engines that ran in parallel; `decode_steps` is the maximum over the engines."""
    return replace(SpeculationStats.merge(parts), decode_steps=max(part.decode_steps for part in parts))


def _sum_per_pos(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))
