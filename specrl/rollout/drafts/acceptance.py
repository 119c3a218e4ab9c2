"""The outcomes of drafts: their accepted prefixes, and the counters by which speculation is judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

DRAFTER, REPLAY, RECENT = "drafter", "replay", "recent"
"""The names of draft sources: vLLM's proposer, text stored for the prompt, and recent responses to any prompt."""


class SourceCounts(NamedTuple):
    """Counters of one source's drafts."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def plus(self, other: SourceCounts) -> SourceCounts:
        """Return the sums of both."""
        return SourceCounts(*map(sum, zip(self, other, strict=True)))


class DraftOutcome(NamedTuple):
    """The outcome of one draft."""

    source: str
    """`DRAFTER` or the name of a text source."""
    drafted: int
    """The number of tokens of the draft."""
    accepted: int
    """The number of these tokens that were accepted."""


@dataclass(frozen=True)
class SpeculationStats:
    """Counters of one or more generations; `a + b` merges them.

    A draft is one proposal of up to k tokens for one request in one iteration. `accepted_per_pos[i]` counts drafts
    whose token i was accepted, `drafted_per_pos[i]` those that had a token i. `decode_steps` counts engine iterations
    in which at least one request was decoding.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    decode_steps: int = 0
    drafted_per_pos: tuple[int, ...] = ()
    by_source: Mapping[str, SourceCounts] = field(default_factory=dict)

    @classmethod
    def of(cls, outcomes: Sequence[DraftOutcome], decode_steps: int = 0) -> SpeculationStats:
        """Return the counters of single drafts, each of at least one token."""
        longest = max((outcome.drafted for outcome in outcomes), default=0)
        by_source: dict[str, SourceCounts] = {}
        for source, drafted, accepted in outcomes:
            by_source[source] = by_source.get(source, SourceCounts()).plus(SourceCounts(1, drafted, accepted))
        return cls(
            num_drafts=len(outcomes),
            num_draft_tokens=sum(outcome.drafted for outcome in outcomes),
            num_accepted_tokens=sum(outcome.accepted for outcome in outcomes),
            accepted_per_pos=tuple(sum(outcome.accepted > i for outcome in outcomes) for i in range(longest)),
            decode_steps=decode_steps,
            drafted_per_pos=tuple(sum(outcome.drafted > i for outcome in outcomes) for i in range(longest)),
            by_source=by_source,
        )

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        sources = dict.fromkeys([*self.by_source, *other.by_source])
        none = SourceCounts()
        return SpeculationStats(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            _sum_per_pos(self.accepted_per_pos, other.accepted_per_pos),
            self.decode_steps + other.decode_steps,
            _sum_per_pos(self.drafted_per_pos, other.drafted_per_pos),
            {name: self.by_source.get(name, none).plus(other.by_source.get(name, none)) for name in sources},
        )

    @staticmethod
    def merge(parts: Iterable[SpeculationStats]) -> SpeculationStats:
        """Return the sum of any number of counters."""
        return sum(parts, SpeculationStats())

    @property
    def acceptance_length(self) -> float:
        """The tokens that a draft brings, bonus token included: 1 + accepted / drafts; 1 without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens over drafted tokens; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rate_per_pos(self) -> tuple[float, ...]:
        """For each position, the share of the drafts that reach it whose token there was accepted."""
        return tuple(
            accepted / drafted for accepted, drafted in zip(self.accepted_per_pos, self.drafted_per_pos, strict=True)
        )


def over_engines(parts: Sequence[SpeculationStats]) -> SpeculationStats:
    """Return the sums over engines that ran side by side, but the decode steps of the engine that took the most."""
    return replace(SpeculationStats.merge(parts), decode_steps=max(part.decode_steps for part in parts))


def _sum_per_pos(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))
