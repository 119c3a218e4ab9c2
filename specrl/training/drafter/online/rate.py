"""How the drafter's online learning rate follows the gain that was measured; arithmetic alone.

Two sets of the drafter's weights are compared on the same text: the present ones and the best ones so far. Acceptance
in the rollouts is no measure of what training gains, because it also depends on the prompts of the step, on the draft
length and on how the policy has changed. The comparison is fair: it is made on the responses of a step before the
drafter learns from them, with the features of the policy that sampled them. So both sets of weights draft the same
unseen tokens for the same policy, and which prompts the step had favours neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from math import sqrt
from typing import Literal

EVERY = 4
"""The number of updates from one comparison to the next. A single update moves acceptance by less than can be told."""
LEAST_RESPONSES = 8
"""The number of responses below which a standard error says little; the comparison waits for a step with more."""
STANDARD_ERRORS = 3.0
"""The number of standard errors by which a difference has to exceed 0 to count."""
RISE, FALL = 2**0.5, 0.5
"""What the learning rate is multiplied by after a clear gain and after a clear loss: two gains make up for one loss."""

Verdict = Literal["better", "worse", "unclear"]


@dataclass(frozen=True)
class PairedCounts:
    """Sums over responses that two sets of weights draft, one draft beginning at each token.

    Of a response, `n` is the number of drafts, and `d` is how many more of their tokens are accepted with the present
    weights than with the best ones.
    """

    responses: int = 0
    n: int = 0
    d: int = 0
    nn: int = 0
    nd: int = 0
    dd: int = 0

    @classmethod
    def of(cls, responses: Iterable[tuple[int, int, int]]) -> PairedCounts:
        """Sum up responses, each given as its drafts and the tokens accepted with the present and the best weights."""
        pairs = [(n, present - best) for n, present, best in responses]
        return cls.total(cls(1, n, d, n * n, n * d, d * d) for n, d in pairs)

    @classmethod
    def total(cls, parts: Iterable[PairedCounts]) -> PairedCounts:
        """Return the sums over all parts."""
        return cls(*(sum(column) for column in zip(*map(astuple, parts), strict=True)))

    def gain(self) -> tuple[float, float]:
        """Return by how many accepted tokens per draft the present weights are ahead, and its standard error.

        The gain is the ratio of two sums over responses, and the standard error is that of such a ratio (Cochran,
        Sampling Techniques, chapter 6): drafts of the same response are not independent. It needs two responses.
        """
        gain = self.d / self.n
        squares = self.dd - 2 * gain * self.nd + gain * gain * self.nn
        return gain, sqrt(max(squares, 0.0) * self.responses / (self.responses - 1)) / self.n


@dataclass
class OnlineRate:
    """The factor of the online learning rate, and when the next comparison is due."""

    reach: float
    """The largest factor; the smallest is its reciprocal, and 1 keeps the rate as it is."""
    factor: float = 1.0
    waited: int = 0
    """The number of updates since the last comparison."""

    def within(self, factor: float) -> float:
        """Return the factor, or the nearest one that is allowed."""
        return min(max(factor, 1 / self.reach), self.reach)

    def due(self) -> bool:
        """Count an update, and return whether a comparison is due before it."""
        self.waited += 1
        return self.waited > EVERY

    def judge(self, counts: PairedCounts) -> Verdict:
        """Say how the present weights compare with the best ones, and move the factor accordingly.

        The best weights stay the same until they are clearly beaten, so that small gains add up until they can be told.
        """
        if counts.responses < LEAST_RESPONSES:
            return "unclear"
        self.waited = 1  # the update that follows
        gain, error = counts.gain()
        if abs(gain) <= STANDARD_ERRORS * error:
            return "unclear"
        self.factor = self.within(self.factor * (RISE if gain > 0 else FALL))
        return "better" if gain > 0 else "worse"
