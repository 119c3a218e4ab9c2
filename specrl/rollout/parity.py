"""Refit is checked, not assumed: engine against trainer on a probe, and what else may be wrong after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


class RefitError(RuntimeError):
    """The engine does not hold the weights it was sent."""


class PolicyParityError(RefitError):
    """The engine's policy is not the trainer's."""


class DrafterCollapseError(RefitError):
    """The engine's drafter is not the trainer's, or its drafts are no longer accepted."""


@dataclass(frozen=True)
class ParityReport:
    """|log-prob(engine) - log-prob(trainer)| over the tokens of a probe, nats."""

    mean: float
    maximum: float
    num_tokens: int


def check_policy(
    engine_logprobs: Sequence[Sequence[float]], trainer_logprobs: Sequence[Sequence[float]], tolerance: float
) -> ParityReport:
    """Compare log-probs of the same sequences; the mean absolute difference must stay within `tolerance` nats.

    Raises:
        ValueError: the two do not have the same shape.
        PolicyParityError: the mean difference is above the tolerance, or a log-prob is not a number.
    """
    if [len(row) for row in engine_logprobs] != [len(row) for row in trainer_logprobs]:
        raise ValueError("engine and trainer log-probs must be of the same sequences, without their first token")
    differences = [
        abs(engine - trainer)
        for engine_row, trainer_row in zip(engine_logprobs, trainer_logprobs, strict=True)
        for engine, trainer in zip(engine_row, trainer_row, strict=True)
    ]
    if not differences:
        raise ValueError("the parity probe has no tokens")
    # NaN would slip through comparisons and through max().
    worst = max(difference if math.isfinite(difference) else math.inf for difference in differences)
    report = ParityReport(math.fsum(differences) / len(differences), worst, len(differences))
    if not math.isfinite(report.maximum) or report.mean > tolerance:
        raise PolicyParityError(
            f"engine and trainer disagree after the refit: mean |difference| of log-probs {report.mean:.4f} nats, "
            f"maximum {report.maximum:.4f}, over {report.num_tokens} tokens; tolerated mean "
            f"engine.parity_tolerance = {tolerance:g}"
        )
    return report


def check_moved_on(
    engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]], earlier: Sequence[Sequence[float]]
) -> bool:
    """Whether the engine's log-probs show the trainer's policy rather than its `earlier` one.

    A refit that silently did nothing passes `check_policy` for as long as the policy moves less than the tolerance.

    Returns:
        False while the two policies are too near to each other to tell.

    Raises:
        PolicyParityError: the engine still computes with the earlier policy.
    """
    to_new, to_old = mean_distance(engine, trainer), mean_distance(engine, earlier)
    if mean_distance(trainer, earlier) <= 2 * min(to_new, to_old):
        return False
    if to_old < to_new:
        raise PolicyParityError(
            f"the engine still computes with an earlier policy: its log-probs are {to_old:.2g} nats from that one's on "
            f"average, and {to_new:.2g} from the trainer's"
        )
    return True


def mean_distance(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Mean |left - right| of log-probs of the same sequences, nats."""
    return fmean(abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))
