"""How idle time is shared out between pre-generation and training of the drafter."""

from __future__ import annotations

import math
from collections.abc import Mapping

from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import DRAFTER, REPLAY, SourceCounts, SpeculationStats
from specrl.timeline import PREGENERATION, SPOT_TRAINING


class BubbleShare:
    """How `both` shares idle time out: by accepted tokens gained per second, as measured in the last steps.

    In every bubble pre-generation goes first, for its share of the seconds expected; the drafter has the rest; a
    longer one begins anew. Before any length is expected pre-generation goes on until nothing is left. The gain of
    pre-generation is what replay got accepted in the step after; the drafter's is how much longer the accepted part of
    a draft became on the guard's probe (always the same prompts and draft length), times its drafts in the step after.
    """

    def __init__(self, settings: ControlSettings | None = None) -> None:
        self._settings = settings or ControlSettings()
        self.pregeneration = 1 - self._settings.least_share
        """Share of the time for pre-generation."""
        self._rates: dict[str, float] = {}
        """Accepted tokens gained per second, by use."""
        self._past: dict[str, float] = {}
        """Seconds of earlier bubbles by use, older ones counting less: what was too short once is made up for."""
        self._probe: float | None = None
        self._gain: float | None = None
        """How many more tokens of a draft were accepted at the last probe than at the one before."""

    def due(self, seconds: Mapping[str, float], expected: float | None) -> float:
        """Return the seconds for which pre-generation may go on now; 0 where it is the drafter's turn.

        Args:
            seconds: those of this bubble so far, by use.
            expected: the length of a whole bubble, seconds; None if nothing is known.
        """
        if expected is None:
            return math.inf
        period = max(expected, self._settings.least_period)
        until = period * (1 + sum(seconds.values()) // period)
        done = seconds.get(PREGENERATION, 0.0) + self._past.get(PREGENERATION, 0.0)
        due = self.pregeneration * (until + sum(self._past.values())) - done
        return due if due > self._settings.least_share * self._settings.least_period else 0.0

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Take the seconds of a bubble of this rank that is over, by use."""
        keep = self._settings.debt_memory
        names = {*self._past, *seconds}
        self._past = {name: keep * (self._past.get(name, 0.0) + seconds.get(name, 0.0)) for name in names}

    def probed(self, acceptance_length: float) -> None:
        """Take what the guard found of the drafter that the next step drafts with."""
        self._gain = acceptance_length - self._probe if self._probe is not None else None
        self._probe = acceptance_length

    def learn(self, seconds: Mapping[str, float], stats: SpeculationStats) -> None:
        """Learn what a bubble's uses brought in the step after it.

        Args:
            seconds: those of all ranks in the bubble, by use.
            stats: what all ranks drafted in the step after.
        """
        self._count(PREGENERATION, stats.by_source.get(REPLAY, SourceCounts()).num_accepted_tokens, seconds)
        if self._gain is not None:
            drafts = stats.by_source.get(DRAFTER, SourceCounts()).num_drafts
            self._count(SPOT_TRAINING, max(0.0, self._gain * drafts), seconds)
        pregeneration, training = (self._rates.get(name) for name in (PREGENERATION, SPOT_TRAINING))
        if pregeneration is None or training is None:
            return
        total, least = pregeneration + training, self._settings.least_share
        self.pregeneration = min(max(pregeneration / total, least), 1 - least) if total else 0.5

    def _count(self, name: str, tokens: float, seconds: Mapping[str, float]) -> None:
        if spent := seconds.get(name, 0.0):
            rate, keep = tokens / spent, self._settings.share_memory
            self._rates[name] = keep * self._rates.get(name, rate) + (1 - keep) * rate
