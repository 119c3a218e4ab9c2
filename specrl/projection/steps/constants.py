"""What a unit of each part's work costs, measured on some steps of a run, and the times of other steps by that.

The arithmetic gives how each part grows; its constants come from the steps that calibrate them:

- generation: seconds for each iteration and for each row, by least squares over the engines' relative errors; the
  simulator finds how many of either there are from the responses;
- policy update: bytes at the rate at which an iteration reads the weights, operations at the rate that explains the
  rest;
- drafter update: operations at the rate of the policy update and a fixed part, or the mean where drafters are merged;
- refit: the mean, with the drafter's probe and without; checkpoint: the mean, with a copy of the state and without.

A step beside which a checkpoint is written takes longer, all of its parts alike, by the mean of what such steps took
more; where none calibrates, by what the writing takes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from specrl.config.rollout import BubbleUse
from specrl.projection.steps.work import MeasuredStep, StepWork
from specrl.projection.tail import DecodingSpeed, SimulatedResponse, simulate


@dataclass(frozen=True)
class RowCost:
    """The time of an iteration as that of reading the weights, and of each row; an `IterationCost`."""

    iteration_s: float
    row_s: float

    def at(self, running: int, generated: float, drafted: float) -> float:
        """Return the seconds of an iteration; how much was generated is not looked at."""
        return self.iteration_s + self.row_s * running * (1 + drafted)


@dataclass(frozen=True)
class Means:
    """The mean seconds of steps that do something and of steps that do not; None where there are no such steps."""

    with_it: float | None
    without: float | None

    @classmethod
    def of(cls, pairs: Sequence[tuple[bool, float]]) -> Means:
        """Return the means of pairs of whether a step does it, and its seconds."""
        yes, no = ([seconds for does, seconds in pairs if does is kind] for kind in (True, False))
        return cls(fmean(yes) if yes else None, fmean(no) if no else None)

    def at(self, does_it: bool) -> float:
        """Return the mean of the steps of one kind, or of the other kind if there are none of this one."""
        own, other = (self.with_it, self.without) if does_it else (self.without, self.with_it)
        return own if own is not None else other or 0.0


@dataclass(frozen=True)
class Constants:
    """The cost of a unit of each part's work, in seconds."""

    curve: RowCost
    """That of an engine's iterations."""
    gathering_s: float
    """From when the last engine has finished to the end of generation: rollouts are gathered, drafts checked."""
    writing_s: float
    """By how much the writing of a checkpoint delays the step beside it."""
    byte_s: float
    """That of a byte of the policy update on one rank."""
    flop_s: float
    """That of an operation of the policy update on one rank."""
    drafter_s: tuple[float, float]
    """The fixed part of the drafter's update, and that of each of its operations on one rank."""
    merge_s: float | None
    """That of a merge of drafters; None where none was measured."""
    refit: Means
    """That of a refit by whether the drafter's probe is generated."""
    checkpoint: Means
    """That of the end of a step by whether the state is copied for a checkpoint."""

    def parts(self, work: StepWork, decoding_s: float) -> dict[str, float]:
        """Return the seconds of a step's parts.

        Args:
            decoding_s: The simulated seconds of the slowest engine.
        """
        fixed, flop_s = self.drafter_s
        seconds = {
            "generation": decoding_s + self.gathering_s,
            "policy_update": self.byte_s * work.update_bytes + self.flop_s * work.update_flops,
            "drafter_update": (self.merge_s or 0.0) if work.merges else fixed + flop_s * work.drafter_flops,
            "refit": self.refit.at(work.probes),
            "checkpoint": self.checkpoint.at(work.saves),
        }
        # A checkpoint is written at low priority, so that it delays all parts alike.
        slowdown = 1 + self.writing_s / sum(seconds.values()) if work.beside_checkpoint else 1.0
        return {part: slowdown * value for part, value in seconds.items()}


def calibrate(steps: Sequence[MeasuredStep], weight_bytes: float, writing_s: float) -> Constants:
    """Return the constants that some steps of a run show.

    Args:
        steps: At least one.
        weight_bytes: The bytes of the weights that a rank reads in an iteration.
        writing_s: How long it takes to write a checkpoint with nothing beside it, in seconds; the delay by it where
            none of the steps has any.
    """
    quiet = [step for step in steps if not step.work.beside_checkpoint] or list(steps)
    curve = _decoding_cost(quiet)
    byte_s = curve.iteration_s / weight_bytes
    flop_s = _flop_seconds(quiet, byte_s)
    merges, updates = ([step for step in quiet if step.work.merges is kind] for kind in (True, False))
    found = Constants(
        curve=curve,
        gathering_s=fmean(step.seconds["generation"] - _slowest(step) for step in quiet),
        writing_s=0.0,
        byte_s=byte_s,
        flop_s=flop_s,
        drafter_s=above([(step.work.drafter_flops, step.seconds["drafter_update"]) for step in updates], flop_s),
        merge_s=fmean(step.seconds["drafter_update"] for step in merges) if merges else None,
        refit=Means.of([(step.work.probes, step.seconds["refit"]) for step in quiet]),
        checkpoint=Means.of([(step.work.saves, step.seconds["checkpoint"]) for step in quiet]),
    )
    undisturbed = [
        (step.seconds["step"], sum(found.parts(step.work, _slowest(step, curve)).values()))
        for step in steps
        if step.work.beside_checkpoint
    ]
    delay = fmean(measured - alone for measured, alone in undisturbed) if undisturbed else writing_s
    return replace(found, writing_s=max(0.0, delay))


def predict(
    works: Sequence[StepWork],
    shares: Sequence[Sequence[Sequence[SimulatedResponse]]],
    constants: Constants,
    speed: DecodingSpeed,
    use: BubbleUse,
    most_running: int,
) -> list[dict[str, float]]:
    """Return the seconds of the parts of every step of a run, by constants of other steps.

    Args:
        works: The work of each step.
        shares: The responses of each step and engine.
        speed: How fast the run follows stored text and how it divides idle time; its curve is not used.
        use: `bubbles.use`.
        most_running: `engine.max_num_seqs`.
    """
    times = simulate(shares, replace(speed, curve=constants.curve), use, most_running)
    return [constants.parts(work, time.generation_s) for work, time in zip(works, times, strict=True)]


def above(points: Sequence[tuple[float, float]], slope: float) -> tuple[float, float]:
    """Return the fixed part and the slope of a line through points (x, y).

    The slope is the given one, and the fixed part what the points lie above it on average. Where they lie below it, the
    line goes through the origin and has their own slope.
    """
    if not points:
        return 0.0, slope
    x, y = fmean(x for x, _ in points), fmean(y for _, y in points)
    return (y - slope * x, slope) if y >= slope * x else (0.0, y / x)


def _decoding_cost(steps: Sequence[MeasuredStep]) -> RowCost:
    """Return the fit of seconds = a * iterations + b * rows by least squares of the engines' relative errors.

    Where that would make one of the two negative, the other one explains all.
    """
    engines = [engine for step in steps for engine in step.engines]
    xs = [engine.iterations / engine.seconds for engine in engines]
    ys = [engine.rows / engine.seconds for engine in engines]
    xx, yy = sum(x * x for x in xs), sum(y * y for y in ys)
    xy = sum(x * y for x, y in zip(xs, ys, strict=True))
    determinant = xx * yy - xy * xy
    row_s = (sum(ys) * xx - sum(xs) * xy) / determinant if determinant > 1e-9 * xx * yy else 0.0
    if row_s <= 0:
        return RowCost(sum(xs) / xx, 0.0)
    iteration_s = (sum(xs) * yy - sum(ys) * xy) / determinant
    return RowCost(iteration_s, row_s) if iteration_s > 0 else RowCost(0.0, sum(ys) / yy)


def _slowest(step: MeasuredStep, curve: RowCost | None = None) -> float:
    """Return the seconds of a step's slowest engine, measured or, with a curve, by its counts."""
    if curve is None:
        return max(engine.seconds for engine in step.engines)
    return max(curve.iteration_s * engine.iterations + curve.row_s * engine.rows for engine in step.engines)


def _flop_seconds(steps: Sequence[MeasuredStep], byte_s: float) -> float:
    """Return the seconds of an operation of the policy update that its bytes do not explain."""
    flops = sum(step.work.update_flops for step in steps)
    rest = sum(step.seconds["policy_update"] - byte_s * step.work.update_bytes for step in steps)
    return max(0.0, rest / flops) if flops else 0.0
