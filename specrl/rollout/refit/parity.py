"""Log-probs of engine and trainer on a probe, compared after a refit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from specrl.rollout.errors import PolicyParityError

DECIDED = 0.75
"""The share of the probe's tokens that must be nearer to one policy than to the other before that one is taken for the
engine's. It is 0.5 on average where rounding is all that tells the two apart."""


@dataclass(frozen=True)
class ParityReport:
    """Mean and maximum of |log-prob(engine) - log-prob(trainer)| over the tokens of a probe, in nats."""

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
    """Return whether the engine's log-probs show the trainer's policy rather than its `earlier` one.

    A refit that silently did nothing passes `check_policy` for as long as the policy moves less than the tolerance.
    Rounding alone moves the log-probs of either side by as much as a small step does, a few tokens' by very much: so
    the policies must be well apart, and most tokens must say the same.

    Returns:
        False as long as the two policies are too near to each other to tell.

    Raises:
        PolicyParityError: the engine still computes with the earlier policy.
    """
    to_new, to_old = mean_distance(engine, trainer), mean_distance(engine, earlier)
    if mean_distance(trainer, earlier) <= 2 * min(to_new, to_old):
        return False
    share = share_nearer(engine, earlier, trainer)
    if to_old < to_new and share > DECIDED:
        raise PolicyParityError(
            f"the engine still computes with an earlier policy: its log-probs are {to_old:.2g} nats from that one's on "
            f"average, and {to_new:.2g} from the trainer's; {share:.0%} of the tokens are nearer to the earlier one"
        )
    return to_new < to_old and share < 1 - DECIDED


def share_nearer(
    engine: Sequence[Sequence[float]], left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]
) -> float:
    """Return the share of the tokens, without undecided ones, at which `engine` is nearer to `left` than to `right`."""
    rows = zip(engine, left, right, strict=True)
    gaps = [abs(e - x) - abs(e - y) for row in rows for e, x, y in zip(*row, strict=True)]
    decided = [gap < 0 for gap in gaps if gap]
    return fmean(decided) if decided else 0.5


def mean_distance(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Return the mean |left - right| of log-probs of the same sequences, in nats."""
    return fmean(abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))
