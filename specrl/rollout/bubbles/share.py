"""How idle time is shared out between pre-generation and training of the drafter."""

from __future__ import annotations

import math
from collections.abc import Mapping

from specrl.rollout.drafts.acceptance import DRAFTER, REPLAY, SourceCounts, SpeculationStats
from specrl.timeline import PREGENERATION, SPOT_TRAINING


class BubbleShare:
    """How `both` shares idle time out: by accepted tokens gained per second, as measured in the last steps.

    In every bubble pre-generation goes first, for its share of the seconds expected; the drafter has the rest; a
    longer one begins anew. Before anything is expected pre-generation goes on until nothing is left. Its gain is what
    replay got accepted in the step after; the drafter's, how much longer what is accepted of a draft on the guard's
    probe became (always the same prompts and draft length), times its drafts in the step after.
    """

    LEAST = 0.1
    """Of the time for either, so that both keep being measured."""
    MEMORY = 0.5
    """Of what was measured before, in each step."""
    DEBT = 0.8
    """Of the seconds that bubbles before were too short for, kept in each step."""
    PERIOD = 0.2
    """Seconds that are shared out at least: below, a piece of work is mostly its start."""
    SHORTEST = 0.02
    """Seconds; pre-generation that has less to do yields."""

    def __init__(self) -> None:
        self.pregeneration = 1 - self.LEAST
        """Share of the time for pre-generation."""
        self._rates: dict[str, float] = {}
        self._past: dict[str, float] = {}
        """Seconds of bubbles before, older ones counting less: what was too short once is made up for."""
        self._probe: float | None = None
        self._gain: float | None = None
        """Of the drafter's accepted tokens per draft, between the last two probes."""

    def due(self, seconds: Mapping[str, float], expected: float | None) -> float:
        """Seconds for which pre-generation may go on now; 0 where it is the drafter's turn.

        Args:
            seconds: of this bubble so far, by use.
            expected: seconds of a whole bubble.
        """
        if expected is None:
            return math.inf
        period = max(expected, self.PERIOD)
        until = period * (1 + sum(seconds.values()) // period)
        done = seconds.get(PREGENERATION, 0.0) + self._past.get(PREGENERATION, 0.0)
        due = self.pregeneration * (until + sum(self._past.values())) - done
        return due if due > self.SHORTEST else 0.0

    def spent(self, seconds: Mapping[str, float]) -> None:
        """A bubble of this rank is over."""
        names = {*self._past, *seconds}
        self._past = {name: self.DEBT * (self._past.get(name, 0.0) + seconds.get(name, 0.0)) for name in names}

    def probed(self, acceptance_length: float) -> None:
        """What the guard found of the drafter that the next step drafts with."""
        self._gain = acceptance_length - self._probe if self._probe is not None else None
        self._probe = acceptance_length

    def learn(self, seconds: Mapping[str, float], stats: SpeculationStats) -> None:
        """What a bubble's use, in seconds of all ranks, brought in the step after it, counted over all ranks."""
        self._count(PREGENERATION, stats.by_source.get(REPLAY, SourceCounts()).num_accepted_tokens, seconds)
        if self._gain is not None:
            drafts = stats.by_source.get(DRAFTER, SourceCounts()).num_drafts
            self._count(SPOT_TRAINING, max(0.0, self._gain * drafts), seconds)
        pregeneration, training = (self._rates.get(name) for name in (PREGENERATION, SPOT_TRAINING))
        if pregeneration is None or training is None:
            return
        total = pregeneration + training
        self.pregeneration = min(max(pregeneration / total, self.LEAST), 1 - self.LEAST) if total else 0.5

    def _count(self, name: str, tokens: float, seconds: Mapping[str, float]) -> None:
        if spent := seconds.get(name, 0.0):
            rate = tokens / spent
            self._rates[name] = self.MEMORY * self._rates.get(name, rate) + (1 - self.MEMORY) * rate
