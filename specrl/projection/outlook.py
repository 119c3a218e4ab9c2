"""What idle time costs and what its uses save, on as many ranks as measured and on more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrl.projection.measured import MeasuredRun
from specrl.projection.tail import USES, Response, Speed, StepTimes, Use, scaled, simulate

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


def outlook(
    run: MeasuredRun, most_running: int, ranks: Sequence[int] = RANKS, speeds: Mapping[Use, Speed] | None = None
) -> list[Prospect]:
    """The uses on the measured number of ranks and on `ranks`, with as many prompts for each rank as measured.

    Args:
        speeds: measured for each use. Without them all have the run's own, and `train_drafter` is left out: it changes
            nothing but the speed.
    """
    found: list[Prospect] = []
    measured = len(run.steps[0])
    speed_of = speeds or {use: run.speed for use in USES if use != "train_drafter"}
    for count in sorted({measured, *ranks}):
        steps = run.steps if count == measured else scaled(run.steps, count)
        without = simulate(steps, speed_of["none"], "none", most_running)
        found += [_prospect(steps, use, without, speed, most_running) for use, speed in speed_of.items()]
    return found


def _prospect(
    steps: Sequence[Sequence[Sequence[Response]]],
    use: Use,
    without: Sequence[StepTimes],
    speed: Speed,
    most_running: int,
) -> Prospect:
    times = simulate(steps, speed, use, most_running)
    ranks = len(steps[0])
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
