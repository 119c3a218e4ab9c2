"""Two generations of the same requests compared: what differs, and whether rounding alone explains it.

Under drafter-invariant sampling the same seed gives the same token unless the two engines' iterations rounded the
policy's distribution differently: a batch's shape decides in which order a kernel adds. Such a difference is a
*near-tie*: u(seed, position) lies beside a step of the CDF, nearer than the step moves between two shapes of *plain*
decoding. Greedy differences are judged by the distance of the two best log-probs instead. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

FLOOR = 1e-6
"""Smallest noise assumed, in CDF units and in nats: FP32 sums of a thousand terms round this far."""
BF16_CDF, BF16_GAP = 2.0**-6, 2.0**-3
"""The same where logits are BF16: those from 16 to 32 are 1/8 apart, and one step of one logit moves the CDF by up to
p (1 - p) / 8. Two shapes may well be rounded alike wherever they are compared, and a third differently."""
HOLDS = 1e-5
"""How far u may lie outside of the picked token's step, which the sampler summed up in another order."""
ALLOWANCE = 2.0
"""Times the largest movement measured: the largest of a sample is below the largest there is."""


@dataclass(frozen=True)
class Pick:
    """One token as it was picked, and how far the pick was from another.

    `lower` and `upper` are the edges of the token's step in the CDF, renormalised over what top-k and top-p leave;
    `gap` is the best log-prob less the second best at temperature 1, nats.
    """

    token: int
    u: float
    lower: float
    upper: float
    gap: float
    greedy: bool


Trace = Mapping[int, Pick]
"""Picks of one response by position in its sequence."""


@dataclass(frozen=True)
class Noise:
    """How far two shapes of plain decoding disagree where they picked the same token after the same tokens."""

    cdf: float
    """Largest movement of an edge of a picked token's step."""
    gap: float
    """Largest movement of the distance of the two best log-probs, nats."""
    num_tokens: int

    def limit(self, *, greedy: bool) -> float:
        """Return the largest distance of a near-tie: nats for greedy responses, a part of the CDF for sampled ones."""
        return ALLOWANCE * max(self.gap if greedy else self.cdf, FLOOR)

    def or_rounding(self, dtype: str) -> Noise:
        """At least what one step of a logit in `dtype` makes, though this measurement did not meet it."""
        if dtype != "bfloat16":
            return self
        return replace(self, cdf=max(self.cdf, BF16_CDF), gap=max(self.gap, BF16_GAP))


@dataclass(frozen=True)
class Divergence:
    """Where a pair of responses parts: the first different token."""

    request: int
    position: int
    left: Pick
    right: Pick

    @property
    def distance(self) -> float:
        """What must have moved for both to be right: a step of the CDF by this much, greedy the gap by this much."""
        if self.left.greedy:
            return max(self.left.gap, self.right.gap)
        first, second = sorted((self.left, self.right), key=lambda pick: pick.token)
        return max(0.0, first.upper - second.lower)

    def explained(self, noise: Noise) -> bool:
        """A near-tie: each token is what its own distribution gives at u, and the two differ by no more than noise."""
        is_near = self.distance <= noise.limit(greedy=self.left.greedy)
        if self.left.greedy:
            return is_near
        return is_near and self.left.u == self.right.u and all(_holds_u(pick) for pick in (self.left, self.right))


def _holds_u(pick: Pick) -> bool:
    return pick.greedy or pick.lower - HOLDS <= pick.u <= pick.upper + HOLDS


@dataclass(frozen=True)
class Comparison:
    """Counts over pairs of responses; tokens after a first difference follow from it and are not compared."""

    num_responses: int
    num_tokens: int
    """Compared: common tokens, and first differences."""
    divergences: tuple[Divergence, ...]
    num_unexplained: int
    """Of these, no near-ties; and tokens, wherever they are, that are not what their distribution gives at u."""

    @property
    def per_1000_tokens(self) -> float:
        return 1000 * len(self.divergences) / max(1, self.num_tokens)


def measure_noise(left: Sequence[Trace], right: Sequence[Trace]) -> Noise:
    """Noise between two generations of the same requests that must both be plain, in batches of other shapes."""
    cdf = gap = 0.0
    num_tokens = 0
    for a, b in zip(left, right, strict=True):
        for position in common_positions(a, b):
            p, q = a[position], b[position]
            cdf = max(cdf, abs(p.lower - q.lower), abs(p.upper - q.upper))
            gap = max(gap, abs(p.gap - q.gap))
            num_tokens += 1
    return Noise(cdf, gap, num_tokens)


def worst(first: Noise, second: Noise) -> Noise:
    """Of two measurements."""
    return Noise(max(first.cdf, second.cdf), max(first.gap, second.gap), first.num_tokens + second.num_tokens)


def compare(left: Sequence[Trace], right: Sequence[Trace], noise: Noise) -> Comparison:
    """Every first difference between two generations of the same requests, judged by `noise`."""
    divergences, num_tokens = [], 0
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        num_tokens += len(common_positions(a, b))
        position = first_difference(a, b)
        if position is not None:
            num_tokens += 1
            divergences.append(Divergence(index, position, a[position], b[position]))
    unexplained = sum(not divergence.explained(noise) for divergence in divergences)
    unexplained += sum(not _holds_u(pick) for trace in (*left, *right) for pick in trace.values())
    return Comparison(len(left), num_tokens, tuple(divergences), unexplained)


def common_positions(left: Trace, right: Trace) -> list[int]:
    """Positions before the first difference."""
    common = []
    for position in sorted(left):
        if position not in right or left[position].token != right[position].token:
            break
        common.append(position)
    return common


def first_difference(left: Trace, right: Trace) -> int | None:
    """The first position at which both have a token and it is not the same; none where the responses are equal.

    Raises:
        ValueError: one is a proper beginning of the other, which no choice of token explains.
    """
    common = common_positions(left, right)
    if len(common) == len(left) == len(right):
        return None
    rest = (set(left) & set(right)).difference(common)
    if not rest:
        raise ValueError(f"responses of {len(left)} and {len(right)} tokens are equal as far as the shorter goes")
    return min(rest)
