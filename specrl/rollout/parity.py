"""Refit is checked, not assumed: engine against trainer on a probe, and the drafter's acceptance against its past."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrl.rollout.acceptance import SpeculationStats


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


class DrafterGuard:
    """Watches the acceptance rate on a fixed probe against its running value; a collapse is an error with a name.

    `probe` generates the same prompts with the same seeds each time and returns the counters. Collapse is a rate below
    `collapse` times the running value and below it by more than four standard errors (binomial, from the number of
    draft tokens), so that neither a noisy small probe nor a slow drift trips it.
    """

    STANDARD_ERRORS = 4.0

    def __init__(self, probe: Callable[[], SpeculationStats], *, collapse: float = 0.5, smoothing: float = 0.5) -> None:
        if not 0 < collapse < 1 or not 0 < smoothing <= 1:
            raise ValueError("collapse must be in (0, 1) and smoothing in (0, 1]")
        self.probe = probe
        self.collapse = collapse
        self.smoothing = smoothing
        self.running: float | None = None

    def check(self, version: int) -> float:
        """Probe after a refit; returns the acceptance rate, and takes it into the running value.

        Raises:
            DrafterCollapseError: acceptance has collapsed; the running value keeps its last good state.
        """
        stats = self.probe()
        rate = stats.acceptance_rate
        if self.running is None:
            self.running = rate
            return rate
        error = math.sqrt(self.running * (1 - self.running) / max(1, stats.num_draft_tokens))
        if rate < self.collapse * self.running and rate < self.running - self.STANDARD_ERRORS * error:
            raise DrafterCollapseError(
                f"acceptance on the probe fell to {rate:.3f} of {stats.num_draft_tokens} draft tokens with drafter "
                f"version {version}; its running value was {self.running:.3f}"
            )
        self.running += self.smoothing * (rate - self.running)
        return rate
