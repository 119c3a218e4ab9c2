"""The learning-rate schedule of the policy, the warm start and the drafter."""

from __future__ import annotations

import math

from specrl.config.training import LrDecay


def lr_factor(step: float, num_steps: int, *, decay: LrDecay, warmup_steps: int, final_fraction: float) -> float:
    """The factor on the peak learning rate at a step: a linear warm-up times a decay over all steps.

    Steps count from 0 and may be fractional; beyond the last one the decay keeps its final value.
    """
    warmup = min(1.0, (step + 1) / max(1, warmup_steps))
    step = min(step, num_steps)
    if decay == "constant":
        return warmup
    if decay == "linear":
        return warmup * (1 - (1 - final_fraction) * step / num_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return warmup * (final_fraction + (1 - final_fraction) * cosine)
