"""Projections of what idle time costs and what its uses save, on the measured number of ranks and on more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrl.config.rollout import BubbleUse
from specrl.projection.measured import MeasuredRun
from specrl.projection.tail import StepTimes, scaled, simulate

PROJECTED_RANKS = (8, 32, 128)
"""The numbers of ranks that a run is projected to."""


@dataclass(frozen=True)
class Projection:
    """One use of idle time, simulated on a number of ranks; ratios are to `none` on the same number of ranks."""

    ranks: int
    use: BubbleUse
    generation_s: float
    """The mean time of a step's generation, in seconds."""
    generation_ratio: float
    """The ratio of the times of generation, summed over steps."""
    decode_step_ratio: float
    """The ratio of the decoding steps of the rank that needs most, summed over steps."""
    idle_share: float
    """The share of the ranks' time that they wait for the slowest rank."""
    used_share: float
    """The share of the idle time that is put to use."""


@dataclass(frozen=True)
class Agreement:
    """The simulated run beside the measured one."""

    generation_s: tuple[float, float]
    """The simulated and the measured time in seconds, summed over steps."""
    iterations: tuple[float, float]
    """The simulated and the measured number of decoding steps, summed over steps."""

    @property
    def generation_error(self) -> float:
        """The relative error of the simulated time."""
        simulated, measured = self.generation_s
        return simulated / measured - 1


def agreement(run: MeasuredRun, use: BubbleUse, most_running: int) -> Agreement:
    """Simulate a run with its own responses on its own ranks, and compare it with what was measured.

    Args:
        use: The run's own `bubbles.use`.
        most_running: The largest number of responses that run at once on a rank, `engine.max_num_seqs`.
    """
    times = simulate(run.steps, run.speed, use, most_running)
    return Agreement(
        (sum(step.generation_s for step in times), sum(run.generation_s)),
        (sum(step.iterations for step in times), sum(run.iterations)),
    )


def project_uses(
    runs: Mapping[BubbleUse, MeasuredRun], most_running: int, ranks: Sequence[int] = PROJECTED_RANKS
) -> list[Projection]:
    """Project the uses of idle time on the measured number of ranks and on `ranks`, with as many prompts for each rank.

    Args:
        runs: For each use, `none` among them, the run whose responses and speeds are taken. It may be a run with that
            use, all of them on the same seeds, or the same run for all.
        most_running: The largest number of responses that run at once on a rank, `engine.max_num_seqs`.
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
