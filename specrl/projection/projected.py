"""Projections of what idle time costs and what its uses save, on as many ranks as measured and on more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrl.config.rollout import BubbleUse
from specrl.projection.measured import MeasuredRun
from specrl.projection.tail import StepTimes, scaled, simulate

RANKS = (8, 32, 128)


@dataclass(frozen=True)
class Projection:
    """One use of idle time, simulated on a number of ranks; ratios are against `none` on as many ranks."""

    ranks: int
    use: BubbleUse
    generation_s: float
    """Mean time of a step's generation, seconds."""
    generation_ratio: float
    decode_step_ratio: float
    idle_share: float
    """Share of the ranks' time until the slowest is done in which they wait."""
    used_share: float
    """Share of the idle time that is put to use."""


@dataclass(frozen=True)
class Agreement:
    """The simulated run beside the measured one."""

    generation_s: tuple[float, float]
    """Simulated and measured time, summed over steps."""
    iterations: tuple[float, float]
    """Simulated and measured decoding steps, summed over steps."""

    @property
    def generation_error(self) -> float:
        """The relative error of the simulated time."""
        simulated, measured = self.generation_s
        return simulated / measured - 1


def agreement(run: MeasuredRun, use: BubbleUse, most_running: int) -> Agreement:
    """Simulate the run as it was dealt, with the use of bubbles that it had, and compare."""
    times = simulate(run.steps, run.speed, use, most_running)
    return Agreement(
        (sum(step.generation_s for step in times), sum(run.generation_s)),
        (sum(step.iterations for step in times), sum(run.iterations)),
    )


def project_uses(
    runs: Mapping[BubbleUse, MeasuredRun], most_running: int, ranks: Sequence[int] = RANKS
) -> list[Projection]:
    """Project the uses on the measured number of ranks and on `ranks`, with as many prompts for each rank as measured.

    Args:
        runs: for each use, `none` among them, the run whose responses and speeds it has: one of its own, on the same
            seeds as the others, or the same for all.
    """
    found: list[Projection] = []
    measured = len(runs["none"].steps[0])
    for count in sorted({measured, *ranks}):
        steps = {use: run.steps if count == measured else scaled(run.steps, count) for use, run in runs.items()}
        times = {use: simulate(steps[use], run.speed, use, most_running) for use, run in runs.items()}
        found += [_projection(count, use, times["none"], times[use]) for use in runs]
    return found


def _projection(ranks: int, use: BubbleUse, without: Sequence[StepTimes], times: Sequence[StepTimes]) -> Projection:
    seconds, idle = sum(step.generation_s for step in times), sum(step.idle_s for step in times)
    return Projection(
        ranks=ranks,
        use=use,
        generation_s=seconds / len(times),
        generation_ratio=seconds / sum(step.generation_s for step in without),
        decode_step_ratio=sum(step.iterations for step in times) / sum(step.iterations for step in without),
        idle_share=idle / (seconds * ranks),
        used_share=sum(step.used_s for step in times) / idle if idle else 0.0,
    )
