"""Compare two generations of the same requests: what differs, and whether rounding alone explains it.

The same seed gives the same token unless the policy's distribution was rounded differently: a batch's shape decides in
which order a kernel adds. Such a difference is a *near-tie*: u(seed, position) lies beside a step of the CDF, nearer
than the step moves between two shapes of *plain* decoding, or two best log-probs are as near in greedy decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

FLOOR = 1e-6
"""The smallest noise that is assumed, of the CDF and in nats: FP32 sums of a thousand terms round this far."""
BF16_CDF, BF16_GAP = 2.0**-6, 2.0**-3
"""The same where logits are BF16: numbers from 16 to 32 are 1/8 apart, and a step of one logit moves the CDF by up to
p (1 - p) / 8, at most 1/32. `ALLOWANCE` doubles both."""
HOLDS = 1e-5
"""How far u may lie outside of the recorded step of its token: the recorder sums in another order."""
ALLOWANCE = 2.0
"""The factor on the largest movement in a sample, which rarely holds the largest there is."""


@dataclass(frozen=True)
class Pick:
    """One token as it was picked, with the edges of its step in the CDF of what top-k and top-p leave, and the gap
    between the two largest log-probs at temperature 1, in nats."""

    token: int
    u: float
    lower: float
    upper: float
    gap: float
    greedy: bool


Trace = Mapping[int, Pick]
"""The picks of one response, by position in its sequence, prompt included."""


@dataclass(frozen=True)
class Noise:
    """How far plain decoding in two batch shapes disagrees where both picked the same token after the same tokens."""

    cdf: float
    """The largest movement of an edge of a token's step."""
    gap: float
    """The largest change of a gap, in nats."""
    num_tokens: int

    def limit(self, *, greedy: bool) -> float:
        """The largest distance of a near-tie: nats for greedy responses, a part of the CDF for sampled ones."""
        return ALLOWANCE * max(self.gap if greedy else self.cdf, FLOOR)

    def or_rounding(self, dtype: str) -> Noise:
        """Noise of at least one rounding step of a logit in `dtype`."""
        if dtype != "bfloat16":
            return self
        return replace(self, cdf=max(self.cdf, BF16_CDF), gap=max(self.gap, BF16_GAP))


@dataclass(frozen=True)
class Divergence:
    """The first token at which two responses to the same request differ."""

    request: int
    position: int
    left: Pick
    right: Pick

    @property
    def distance(self) -> float:
        """How far the CDF, or for greedy picks the gap in nats, must have moved if both picks are right."""
        if self.left.greedy:
            return max(self.left.gap, self.right.gap)
        first, second = sorted((self.left, self.right), key=lambda pick: pick.token)
        return max(0.0, first.upper - second.lower)

    def explained(self, noise: Noise) -> bool:
        """Whether this is a near-tie: both tokens are right at u, and the distance is within the limit."""
        is_near = self.distance <= noise.limit(greedy=self.left.greedy)
        if self.left.greedy:
            return is_near
        return is_near and self.left.u == self.right.u and all(_holds_u(pick) for pick in (self.left, self.right))


def _holds_u(pick: Pick) -> bool:
    return pick.greedy or pick.lower - HOLDS <= pick.u <= pick.upper + HOLDS


@dataclass(frozen=True)
class Comparison:
    """Counts over pairs of responses. Tokens after a first difference follow from it and are not compared."""

    num_responses: int
    num_tokens: int
    """The number of compared tokens: equal ones before any difference, and first differences."""
    divergences: tuple[Divergence, ...]
    num_unexplained: int
    """Divergences that are no near-ties, and tokens anywhere that are not what their own distribution gives at u."""


def measure_noise(left: Sequence[Trace], right: Sequence[Trace]) -> Noise:
    """Measure the noise between two plain generations of the same requests in batches of different shapes.

    Raises:
        ValueError: One response is a proper beginning of the other.
    """
    cdf = gap = 0.0
    num_tokens = 0
    for a, b in zip(left, right, strict=True):
        for position in _agreement(a, b)[0]:
            p, q = a[position], b[position]
            cdf = max(cdf, abs(p.lower - q.lower), abs(p.upper - q.upper))
            gap = max(gap, abs(p.gap - q.gap))
            num_tokens += 1
    return Noise(cdf, gap, num_tokens)


def worst(first: Noise, second: Noise) -> Noise:
    """The larger noise of two measurements, with the tokens of both."""
    return Noise(max(first.cdf, second.cdf), max(first.gap, second.gap), first.num_tokens + second.num_tokens)


def compare(left: Sequence[Trace], right: Sequence[Trace], noise: Noise) -> Comparison:
    """Find the first difference of every pair of responses to the same request, and judge it by `noise`.

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
    unexplained += sum(not _holds_u(pick) for trace in (*left, *right) for pick in trace.values())
    return Comparison(len(left), num_tokens, tuple(divergences), unexplained)


def _agreement(left: Trace, right: Trace) -> tuple[list[int], int | None]:
    """The positions before the first difference, ascending, and that difference; None if the responses are equal.

    Raises:
        ValueError: One response is a proper beginning of the other, which no choice of token explains.
    """
    both = sorted(set(left) & set(right))
    for place, position in enumerate(both):
        if left[position].token != right[position].token:
            return both[:place], position
    if len(left) != len(right):
        raise ValueError(f"responses of {len(left)} and {len(right)} tokens are equal as far as the shorter one goes")
    return both, None
