"""What idle time costs and what its uses save, on as many ranks as measured and on more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrl.projection.measured import MeasuredRun
from specrl.projection.tail import StepTimes, Use, scaled, simulate

RANKS = (8, 32, 128)


@dataclass(frozen=True)
class Prospect:
    """One use of idle time on so many ranks, simulated; ratios against `none` on as many."""

    ranks: int
    use: Use
    generation_s: float
    """Mean of a step."""
    generation_ratio: float
    decode_step_ratio: float
    idle_share: float
    """Of the ranks' time until the slowest is done."""
    used_share: float
    """Of the idle time."""


@dataclass(frozen=True)
class Agreement:
    """The simulated run beside the measured one."""

    generation_s: tuple[float, float]
    """Simulated, measured; summed over steps."""
    iterations: tuple[float, float]

    @property
    def generation_error(self) -> float:
        simulated, measured = self.generation_s
        return simulated / measured - 1


def agreement(run: MeasuredRun, use: Use, most_running: int) -> Agreement:
    """The run as it was dealt, with the use of bubbles it had."""
    times = simulate(run.steps, run.speed, use, most_running)
    return Agreement(
        (sum(step.generation_s for step in times), sum(run.generation_s)),
        (sum(step.iterations for step in times), sum(run.iterations)),
    )


def outlook(runs: Mapping[Use, MeasuredRun], most_running: int, ranks: Sequence[int] = RANKS) -> list[Prospect]:
    """The uses on the measured number of ranks and on `ranks`, with as many prompts for each rank as measured.

    Args:
        runs: for each use, `none` among them, the run whose responses and speeds it has: one of its own, on the same
            seeds as the others, or the same for all.
    """
    found: list[Prospect] = []
    measured = len(runs["none"].steps[0])
    for count in sorted({measured, *ranks}):
        steps = {use: run.steps if count == measured else scaled(run.steps, count) for use, run in runs.items()}
        times = {use: simulate(steps[use], run.speed, use, most_running) for use, run in runs.items()}
        found += [_prospect(count, use, times["none"], times[use]) for use in runs]
    return found


def _prospect(ranks: int, use: Use, without: Sequence[StepTimes], times: Sequence[StepTimes]) -> Prospect:
    seconds, idle = sum(step.generation_s for step in times), sum(step.idle_s for step in times)
    return Prospect(
        ranks=ranks,
        use=use,
        generation_s=seconds / len(times),
        generation_ratio=seconds / sum(step.generation_s for step in without),
        decode_step_ratio=sum(step.iterations for step in times) / sum(step.iterations for step in without),
        idle_share=idle / (seconds * ranks),
        used_share=sum(step.used_s for step in times) / idle if idle else 0.0,
    )
