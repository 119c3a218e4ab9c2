"""The sharing of idle time replayed on recorded steps: how many accepted tokens each way of sharing brings."""

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
"""Steps of a replay: recorded ones in random order, again and again."""
ITERATION_SECONDS, UPDATE_SECONDS = 0.05, 0.1
"""What is begun is finished: an engine iteration of pre-generation, a micro-step of the drafter."""


@dataclass(frozen=True)
class BubbleStep:
    """One recorded step: how long its ranks waited, and what a second of either use brought."""

    seconds: tuple[float, ...]
    """Of each rank's bubble."""
    pregeneration: float
    """Tokens of stored text accepted in the next step, per second of pre-generation."""
    training: float
    """Tokens more that a draft got accepted on the guard's probe, per second of training; may be negative."""
    drafts: int
    """Drafts of the drafter in the next step."""


def bubble_steps(records: Sequence[StepRecord]) -> list[BubbleStep]:
    """Return what a run with `bubbles.use = "both"` recorded, without steps in which one of the uses had no time."""
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
        fixed: a share of pre-generation that is never changed.
        learning: a factor on what training brings in the first half of the replay: a drafter that still learns.
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
    """Return the seconds of each use of one bubble."""
    seconds = {PREGENERATION: 0.0, SPOT_TRAINING: 0.0}
    while (left := length - sum(seconds.values())) > 1e-6:
        if due := share.due(seconds, expected):
            seconds[PREGENERATION] += min(due + ITERATION_SECONDS, left)
        else:
            seconds[SPOT_TRAINING] += min(UPDATE_SECONDS, left)
    return seconds
