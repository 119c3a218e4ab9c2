"""The comparison of the engine's and the trainer's log-probs on a probe, after a refit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from specrl.rollout.errors import PolicyParityError

DECIDED = 0.75
"""The share of tokens that must be nearer to one of two policies for that to be the engine's; 0.5 is chance."""


@dataclass(frozen=True)
class ParityReport:
    """The mean and the maximum of |log-prob(engine) - log-prob(trainer)| over the tokens of a probe, in nats."""

    mean: float
    maximum: float
    num_tokens: int


def check_policy(
    engine_logprobs: Sequence[Sequence[float]], trainer_logprobs: Sequence[Sequence[float]], tolerance: float
) -> ParityReport:
    """Compare log-probs of the same sequences; the mean absolute difference must stay within `tolerance` nats.

    Raises:
        ValueError: The two do not have the same shape, or there are no tokens.
        PolicyParityError: The mean difference is above the tolerance, or a log-prob is not finite.
    """
    if [len(row) for row in engine_logprobs] != [len(row) for row in trainer_logprobs]:
        raise ValueError("the log-probs of engine and trainer must be of the same sequences, without their first token")
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
            f"maximum {report.maximum:.4f}, over {report.num_tokens} tokens; the mean may be at most {tolerance:g} "
            "(engine.parity_tolerance, and what the calibration of FP8 allows where precisions differ)"
        )
    return report


def check_moved_on(
    engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]], earlier: Sequence[Sequence[float]]
) -> bool:
    """Whether it is certain that the engine's log-probs are those of the trainer's policy, not of its `earlier` one.

    Weights that silently stay as they were pass the other checks while the policy moves less than their tolerances, and
    so does a trainer that sends those of an earlier step. Rounding moves some tokens by more than a step does, so the
    two policies must be well apart, and most tokens must agree on which of them it is.

    Raises:
        PolicyParityError: The engine still computes with the earlier policy.
    """
    to_new, to_old = mean_distance(engine, trainer), mean_distance(engine, earlier)
    if mean_distance(trainer, earlier) <= 2 * min(to_new, to_old):
        return False
    share = share_nearer(engine, earlier, trainer)
    if to_old < to_new and share > DECIDED:
        raise PolicyParityError(
            f"the engine still computes with an earlier policy: on average its log-probs are {to_old:.2g} nats from "
            f"that policy's and {to_new:.2g} from the trainer's; {share:.0%} of tokens are nearer to the earlier one"
        )
    return to_new < to_old and share < 1 - DECIDED


def share_nearer(
    engine: Sequence[Sequence[float]], left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]
) -> float:
    """The share of tokens at which `engine` is nearer to `left` than to `right`; ties are left out."""
    rows = zip(engine, left, right, strict=True)
    gaps = [abs(e - x) - abs(e - y) for row in rows for e, x, y in zip(*row, strict=True)]
    decided = [gap < 0 for gap in gaps if gap]
    return fmean(decided) if decided else 0.5


def mean_distance(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """The mean |left - right| of log-probs of the same sequences, in nats."""
    return fmean(abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))
