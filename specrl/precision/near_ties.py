"""Compare two generations of the same requests: where they differ, and whether rounding alone explains it.

The same seed gives the same token unless the policy's distribution was rounded differently: a batch's shape determines
the order in which a kernel adds. The picked token leads all others in log-prob plus noise or, in greedy decoding, in
log-prob alone. A difference is a *near-tie* if the sum of both leads is no more than leads move between two shapes.
With top-p or top-k this says little: a token at the edge may be kept in one shape and dropped in another, whatever
leads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

FLOOR = 4e-6
"""The smallest assumed movement, in nats: the spacing of FP32 numbers from 32 to 64."""
BF16_FLOOR = 2.0**-3
"""The same for BF16 logits: numbers from 16 to 32 are 1/8 apart."""
HOLDS = 1e-5
"""How far the picked token may trail in the record, in nats: the recorder rounds differently."""
ALLOWANCE = 2.0
"""The factor on the largest movement in a sample, which rarely contains the largest possible one."""


@dataclass(frozen=True)
class Pick:
    """One picked token."""

    token: int
    lead: float
    """Its lead over the best other token kept by top-k and top-p, in nats at temperature 1."""
    rival: int = -1
    """That token."""


Trace = Mapping[int, Pick]
"""The picks of one response, by position in its sequence, prompt included."""


def limit_of(noise: float) -> float:
    """The largest distance of a near-tie, in nats, if leads move by `noise` between two batch shapes."""
    return ALLOWANCE * max(noise, FLOOR)


def rounding_of(dtype: str) -> float:
    """How far, in nats, rounding logits to a type may move a lead; 0 for float32, which `FLOOR` covers."""
    return BF16_FLOOR if dtype == "bfloat16" else 0.0


@dataclass(frozen=True)
class Divergence:
    """The first token at which two responses to the same request differ."""

    request: int
    position: int
    left: Pick
    right: Pick

    @property
    def distance(self) -> float:
        """How far, in nats, a lead must have moved if both picks are right."""
        return self.left.lead + self.right.lead

    def explained(self, noise: float) -> bool:
        """Whether this is a near-tie: both tokens lead, and the distance is within the limit."""
        return self.distance <= limit_of(noise) and _leads(self.left) and _leads(self.right)


def _leads(pick: Pick) -> bool:
    return pick.lead >= -HOLDS


@dataclass(frozen=True)
class Comparison:
    """Counts over pairs of responses. Tokens after a first difference follow from it and are not compared."""

    num_responses: int
    num_tokens: int
    """The number of compared tokens: equal ones before any difference, and first differences."""
    divergences: tuple[Divergence, ...]
    num_unexplained: int
    """Divergences that are not near-ties, and all tokens that do not lead in their own distribution."""


def measure_noise(left: Sequence[Trace], right: Sequence[Trace]) -> float:
    """The largest movement of a lead, in nats, between plain generations of the same requests in two batch shapes.

    It is that of tokens which both picked after the same tokens.

    Raises:
        ValueError: One response is a proper beginning of the other.
    """
    moved = [0.0]
    for a, b in zip(left, right, strict=True):
        for position in _agreement(a, b)[0]:
            one, other = a[position], b[position]
            if one.rival == other.rival and isfinite(one.lead) and isfinite(other.lead):
                moved.append(abs(one.lead - other.lead))
    return max(moved)


def compare(left: Sequence[Trace], right: Sequence[Trace], noise: float) -> Comparison:
    """Find the first difference of every pair of responses to the same request, and judge it by `noise`, in nats.

    Raises:
        ValueError: One response is a proper beginning of the other.
    """
    divergences, num_tokens = [], 0
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        common, position = _agreement(a, b)
        num_tokens += len(common)
        if position is not None:
            num_tokens += 1
            divergences.append(Divergence(index, position, a[position], b[position]))
    unexplained = sum(not divergence.explained(noise) for divergence in divergences)
    unexplained += sum(not _leads(pick) for trace in (*left, *right) for pick in trace.values())
    return Comparison(len(left), num_tokens, tuple(divergences), unexplained)


def _agreement(left: Trace, right: Trace) -> tuple[list[int], int | None]:
    """The positions before the first difference, ascending, and that difference; None if the responses are equal."""
    both = sorted(set(left) & set(right))
    for place, position in enumerate(both):
        if left[position].token != right[position].token:
            return both[:place], position
    if len(left) != len(right):
        raise ValueError(f"responses of {len(left)} and {len(right)} tokens: one is the beginning of the other")
    return both, None
