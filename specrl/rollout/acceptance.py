"""What became of drafts: the accepted prefix, and the counters that speculation is judged by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest


def accepted_prefix(drafts: Sequence[int], picked: Sequence[int]) -> int:
    """Number of leading drafts that are the tokens the sampler picked at their positions."""
    count = 0
    for draft, token in zip(drafts, picked, strict=False):
        if draft != token:
            break
        count += 1
    return count


@dataclass(frozen=True)
class SpeculationStats:
    """Counters of one or more generations; `a + b` merges them.

    A draft is one proposal of up to k tokens for one request in one iteration. `accepted_per_pos[i]` counts drafts
    whose token i was accepted. `decode_steps` counts engine iterations in which at least one request was decoding.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    decode_steps: int = 0

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        positions = zip_longest(self.accepted_per_pos, other.accepted_per_pos, fillvalue=0)
        return SpeculationStats(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            tuple(a + b for a, b in positions),
            self.decode_steps + other.decode_steps,
        )

    @staticmethod
    def merge(parts: Iterable[SpeculationStats]) -> SpeculationStats:
        return sum(parts, SpeculationStats())

    @property
    def acceptance_length(self) -> float:
        """Tokens a draft yields, the bonus token included: 1 + accepted / drafts; 1 without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rate_per_pos(self) -> tuple[float, ...]:
        """Unconditional: drafts accepted up to and including position i, over all drafts."""
        return tuple(count / max(1, self.num_drafts) for count in self.accepted_per_pos)


def over_engines(parts: Sequence[SpeculationStats]) -> SpeculationStats:
    """Counters of engines that ran side by side: sums, and the decode steps of the engine that took most."""
    return replace(SpeculationStats.merge(parts), decode_steps=max(part.decode_steps for part in parts))
