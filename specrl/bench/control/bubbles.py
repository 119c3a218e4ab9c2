"""Replay the sharing of idle time on recorded steps: how many accepted tokens does each way of sharing bring?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from specrl.rollout.bubbles.bubbles import by_use
from specrl.rollout.bubbles.share import BubbleShare
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import DRAFTER, REPLAY, SourceCounts, SpeculationStats
from specrl.step_record import StepRecord
from specrl.timeline import PREGENERATION, SPOT_TRAINING

PROBE = "refit/probe_acceptance_length"
STEPS = 60
"""The number of steps of a replay, drawn at random from the recorded ones."""
MIN_STEPS, MIN_STEPS_OF_A_USE = 8, 4
"""The least number of recorded steps, and of those in which a use had time, from which a replay draws."""
ITERATION_SECONDS, UPDATE_SECONDS = 0.05, 0.1
"""The seconds of an iteration of pre-generation and of a micro-step of training; either is finished once begun."""


@dataclass(frozen=True)
class BubbleTrace:
    """What was recorded of the bubbles of a run.

    A step in which only one of the uses had time tells of that use alone, so the three lists have lengths of their own.
    """

    seconds: list[tuple[float, ...]]
    """The length of each rank's bubble, in seconds, by step."""
    pregeneration: list[float]
    """The tokens of stored text accepted in the next step, per second of pre-generation."""
    training: list[tuple[float, int]]
    """The growth of the acceptance length on the guard's probe per second of training, which may be negative, and the
    number of the drafter's drafts in the next step."""

    @property
    def tells(self) -> bool:
        """Whether there are enough steps to draw from."""
        return len(self.seconds) >= MIN_STEPS and min(len(self.pregeneration), len(self.training)) >= MIN_STEPS_OF_A_USE


def bubble_trace(records: Sequence[StepRecord]) -> BubbleTrace:
    """Return what a run with `bubbles.use = "both"` recorded."""
    trace = BubbleTrace([], [], [])
    probe, training = (records[0].metrics.get(PROBE) if records else None), 0.0
    for record, after in pairwise(records[1:]):
        last = max(rank.bubble.generated_at for rank in record.ranks)
        trace.seconds.append(tuple(last - rank.bubble.generated_at for rank in record.ranks))
        used = by_use([span for rank in record.ranks for span in rank.bubble.spans])
        if used.get(PREGENERATION):
            accepted = after.by_source.get(REPLAY, SourceCounts()).num_accepted_tokens
            trace.pregeneration.append(accepted / used[PREGENERATION])
        training += used.get(SPOT_TRAINING, 0.0)
        if (found := record.metrics.get(PROBE)) is None:  # this refit had no probe
            continue
        if probe is not None and training:
            drafts = after.by_source.get(DRAFTER, SourceCounts()).num_drafts
            trace.training.append(((found - probe) / training, drafts))
        probe, training = found, 0.0
    return trace


def gained(
    trace: BubbleTrace, settings: ControlSettings, seed: int, fixed: float | None = None, worth: float = 1.0
) -> float:
    """Replay bubbles in random order and return the accepted tokens that their use brought.

    A few steps tell how noisy the guard's probe is and not what training brings, so that is assumed.

    Args:
        fixed: A share for pre-generation that never changes; None for the share as it is learned.
        worth: What a second of training brings in the first half of the replay, as a factor on what a second of
            pre-generation brings; in the second half it is a quarter of that, as for a drafter that has learned.
    """
    drafts = fmean(count for _, count in trace.training)
    growth = worth * fmean(trace.pregeneration) / drafts
    noise = [found - fmean(rate for rate, _ in trace.training) for found, _ in trace.training]
    generator = random.Random(seed)
    shares = [BubbleShare(settings) for _ in trace.seconds[0]]
    expected: list[float | None] = [None for _ in shares]
    total, probe = 0.0, 2.0
    for number in range(STEPS):
        seconds = generator.choice(trace.seconds)
        pregeneration = generator.choice(trace.pregeneration)
        training = growth if number < STEPS // 2 else growth / 4
        error = generator.choice(noise)
        used: dict[str, float] = {PREGENERATION: 0.0, SPOT_TRAINING: 0.0}
        for rank, (share, length) in enumerate(zip(shares, seconds, strict=True)):
            if fixed is not None:
                share.pregeneration = fixed
            own = _spend(share, length, expected[rank])
            share.spent(own)
            before = expected[rank]
            keep = settings.share_memory if before is not None else 0.0
            expected[rank] = keep * (before or 0.0) + (1 - keep) * length
            used = {name: used[name] + own[name] for name in used}
        gain = training * used[SPOT_TRAINING]
        replayed = round(pregeneration * used[PREGENERATION])
        counts = {REPLAY: SourceCounts(1, replayed, replayed), DRAFTER: SourceCounts(round(drafts), 0, 0)}
        seen = gain + error * used[SPOT_TRAINING]
        for share in shares:
            share.probed(probe)
            share.probed(probe + seen)
            share.learn(used, SpeculationStats(by_source=counts))
        total += replayed + gain * drafts
    return total


def _spend(share: BubbleShare, length: float, expected: float | None) -> dict[str, float]:
    """Return the seconds of each use in a bubble of `length` seconds."""
    seconds = {PREGENERATION: 0.0, SPOT_TRAINING: 0.0}
    while (left := length - sum(seconds.values())) > 1e-6:
        if due := share.due(seconds, expected):
            seconds[PREGENERATION] += min(due + ITERATION_SECONDS, left)
        else:
            seconds[SPOT_TRAINING] += min(UPDATE_SECONDS, left)
    return seconds
