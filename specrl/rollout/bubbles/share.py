"""The bubble share: how idle time is divided between pre-generation and training of the drafter."""

from __future__ import annotations

import math
from collections.abc import Mapping

from specrl.rollout.drafts.acceptance import DRAFTER, REPLAY, SourceCounts, SpeculationStats
from specrl.timeline import PREGENERATION, SPOT_TRAINING

LEAST_SHARE = 0.1
"""The least share of idle time for either use, so that both keep being measured."""
MEMORY = 0.75
"""The weight of earlier steps in the running means of each use's gain and of a bubble's length."""
DEBT_MEMORY = 0.8
"""The factor, at every step, on the seconds that each use had in earlier bubbles: what got too little gets more."""


class BubbleShare:
    """Shares out idle time with `bubbles.use = "both"`, by the accepted tokens that each use gains per second.

    In every bubble pre-generation goes first, for its share of the expected seconds, or for all of them before any are
    expected; a bubble that lasts longer is shared out again. The gain of pre-generation is the number of stored tokens
    accepted in the step after. That of training is the growth of the acceptance length from one probe of the guard to
    the next, times the number of the drafter's drafts in the step after, over the training since the probe before.
    """

    def __init__(self) -> None:
        self.pregeneration = 1 - LEAST_SHARE
        """The share of the time that pre-generation gets."""
        self._rates: dict[str, float] = {}  # accepted tokens per second of each use, running means
        self._past: dict[str, float] = {}  # the seconds of each use in earlier bubbles, older ones counting less
        self._probe: float | None = None  # the acceptance length on the last probe
        self._gain: float | None = None  # by how much it exceeds that on the probe before
        self._is_new = False  # whether nothing was learned since the last probe
        self._training = 0.0  # the seconds of training from which something was learned since then

    def due(self, seconds: Mapping[str, float], expected: float | None) -> float:
        """The seconds for which pre-generation may go on now; 0 where it is the drafter's turn.

        Args:
            seconds: The seconds of each use in this bubble so far.
            expected: The expected seconds of a whole bubble; None if nothing is known.
        """
        if not expected:
            return math.inf
        until = expected * (1 + sum(seconds.values()) // expected)
        done = seconds.get(PREGENERATION, 0.0) + self._past.get(PREGENERATION, 0.0)
        return max(0.0, self.pregeneration * (until + sum(self._past.values())) - done)

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Take in the seconds of each use in a bubble of this rank that is over."""
        keep = DEBT_MEMORY
        names = {*self._past, *seconds}
        self._past = {name: keep * (self._past.get(name, 0.0) + seconds.get(name, 0.0)) for name in names}

    def probed(self, acceptance_length: float) -> None:
        """Take in the acceptance length on the guard's probe of the drafter that the next step drafts with."""
        self._gain = acceptance_length - self._probe if self._probe is not None else None
        self._probe, self._is_new = acceptance_length, True

    def learn(self, seconds: Mapping[str, float], stats: SpeculationStats) -> None:
        """Learn what a bubble's uses, by their seconds on all ranks, brought in the step after it."""
        replayed = stats.by_source.get(REPLAY, SourceCounts()).num_accepted_tokens
        self._count(PREGENERATION, replayed, seconds.get(PREGENERATION, 0.0))
        self._training += seconds.get(SPOT_TRAINING, 0.0)
        if self._is_new:
            drafts = stats.by_source.get(DRAFTER, SourceCounts()).num_drafts
            if self._gain is not None:
                self._count(SPOT_TRAINING, max(0.0, self._gain * drafts), self._training)
            self._is_new, self._training = False, 0.0
        pregeneration, training = (self._rates.get(name) for name in (PREGENERATION, SPOT_TRAINING))
        if pregeneration is None or training is None:
            return
        total, least = pregeneration + training, LEAST_SHARE
        self.pregeneration = min(max(pregeneration / total, least), 1 - least) if total else 0.5

    def _count(self, name: str, tokens: float, seconds: float) -> None:
        if seconds:
            rate, keep = tokens / seconds, MEMORY
            self._rates[name] = keep * self._rates.get(name, rate) + (1 - keep) * rate
