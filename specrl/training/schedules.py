"""The learning-rate schedule of the policy, the warm start and the drafter."""

from __future__ import annotations

import math

from specrl.config.training import LrDecay


def lr_factor(step: float, num_steps: int, *, decay: LrDecay, warmup_steps: int, final_fraction: float) -> float:
    """Return the factor of the peak learning rate at a step: a linear warm-up times a decay over all steps.

    Args:
        step: The step, counted from 0, or a place between two; beyond the last step the decay stays where it ended.
        num_steps: The number of steps until the decay reaches `final_fraction`.
        decay: The course of the decay; with `constant` there is none.
        warmup_steps: The number of steps in which the factor rises from near 0; 0 or 1 for no warm-up.
        final_fraction: The fraction of its peak that the learning rate falls to.
    """
    warmup = min(1.0, (step + 1) / max(1, warmup_steps))
    step = min(step, num_steps)
    if decay == "constant":
        return warmup
    if decay == "linear":
        return warmup * (1 - (1 - final_fraction) * step / num_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return warmup * (final_fraction + (1 - final_fraction) * cosine)
