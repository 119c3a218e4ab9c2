"""Replay the sharing of idle time on recorded steps: how many accepted tokens does each way of sharing bring?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from specrl.rollout.bubbles.bubbles import by_use
from specrl.rollout.bubbles.share import BubbleShare
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import DRAFTER, REPLAY, SourceCounts, SpeculationStats
from specrl.step_record import StepRecord
from specrl.timeline import PREGENERATION, SPOT_TRAINING

PROBE = "refit/probe_acceptance_length"
STEPS = 60
"""The number of steps of a replay, drawn at random from the recorded ones."""
ITERATION_SECONDS, UPDATE_SECONDS = 0.05, 0.1
"""The seconds of an iteration of pre-generation and of a micro-step of training; either is finished once begun."""


@dataclass(frozen=True)
class BubbleStep:
    """One recorded step: how long its ranks waited, and what a second of either use brought."""

    seconds: tuple[float, ...]
    """The length of each rank's bubble, in seconds."""
    pregeneration: float
    """The tokens of stored text accepted in the next step, per second of pre-generation."""
    training: float
    """The growth of the acceptance length on the guard's probe, per second of training; it may be negative."""
    drafts: int
    """The number of the drafter's drafts in the next step."""


def bubble_steps(records: Sequence[StepRecord]) -> list[BubbleStep]:
    """Return the steps of a run with `bubbles.use = "both"`, without those in which one of the uses had no time."""
    found = []
    for before, record, after in zip(records, records[1:], records[2:], strict=False):
        used = by_use([span for rank in record.ranks for span in rank.bubble.spans])
        if not used.get(PREGENERATION) or not used.get(SPOT_TRAINING):
            continue
        last = max(rank.bubble.generated_at for rank in record.ranks)
        found.append(
            BubbleStep(
                tuple(last - rank.bubble.generated_at for rank in record.ranks),
                after.by_source.get(REPLAY, SourceCounts()).num_accepted_tokens / used[PREGENERATION],
                (record.metrics[PROBE] - before.metrics[PROBE]) / used[SPOT_TRAINING],
                after.by_source.get(DRAFTER, SourceCounts()).num_drafts,
            )
        )
    return found


def gained(
    steps: Sequence[BubbleStep], settings: ControlSettings, seed: int, fixed: float | None = None, learning: float = 1.0
) -> float:
    """Replay steps in random order and return the accepted tokens that the use of their bubbles brought.

    Args:
        fixed: A share for pre-generation that never changes; None for the share as it is learned.
        learning: A factor on what training brings in the first half of the replay, as for a drafter that still learns.
    """
    generator = random.Random(seed)
    shares = [BubbleShare(settings) for _ in steps[0].seconds]
    expected: list[float | None] = [None for _ in shares]
    total, probe = 0.0, 2.0
    for number in range(STEPS):
        step = generator.choice(steps)
        training = step.training * (learning if number < STEPS // 2 else 1.0)
        used: dict[str, float] = {PREGENERATION: 0.0, SPOT_TRAINING: 0.0}
        for rank, (share, length) in enumerate(zip(shares, step.seconds, strict=True)):
            if fixed is not None:
                share.pregeneration = fixed
            own = _spend(share, length, expected[rank])
            share.spent(own)
            before = expected[rank]
            keep = settings.share_memory if before is not None else 0.0
            expected[rank] = keep * (before or 0.0) + (1 - keep) * length
            used = {name: used[name] + own[name] for name in used}
        gain = training * used[SPOT_TRAINING]
        replayed = round(step.pregeneration * used[PREGENERATION])
        counts = {REPLAY: SourceCounts(1, replayed, replayed), DRAFTER: SourceCounts(step.drafts, 0, 0)}
        for share in shares:
            share.probed(probe)
            share.probed(probe + gain)
            share.learn(used, SpeculationStats(by_source=counts))
        total += replayed + gain * step.drafts
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
