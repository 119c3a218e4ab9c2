"""The simulated steps of a finished run beside the measured ones, part by part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from specrl.config import Config
from specrl.models.shapes import ModelShape
from specrl.projection.measured import MeasuredRun
from specrl.projection.steps.constants import Constants, calibrate, predict
from specrl.projection.steps.work import PARTS, MeasuredStep, engine_bytes, read_steps

AIM = 0.1
"""The largest relative error of a part that counts as agreement."""
LEAST_STEPS = 4
"""The fewest steps of a run that are divided in halves."""
NAMED_SHARE = 0.25
"""A step is named as a cause if it has at least this share of the differences of its part."""


@dataclass(frozen=True)
class RunSteps:
    """What is read of a finished run."""

    name: str
    config: Config
    steps: list[MeasuredStep]
    generation: MeasuredRun
    weight_bytes: float
    """The bytes of the weights that a rank reads in an iteration."""
    writing_s: float
    """How long the last checkpoint took to be written, after the last step and with nothing beside it, in seconds."""

    @classmethod
    def read(cls, name: str, config: Config, train_dir: Path, shape: ModelShape, generation: MeasuredRun) -> RunSteps:
        """Read a run's steps.

        Args:
            train_dir: The folder of its train stage.
            shape: That of its policy.
            generation: What was read of its generation.
        """
        steps = read_steps(train_dir / "steps", train_dir / "rollouts", config, shape)
        seconds = train_dir / "checkpoints" / ".seconds.json"
        writing_s = float(json.loads(seconds.read_text())["seconds"]) if seconds.is_file() else 0.0
        return cls(name, config, steps, generation, engine_bytes(config, shape), writing_s)

    def constants(self, steps: Sequence[MeasuredStep]) -> Constants:
        """Return the constants that some of the steps show."""
        return calibrate(steps, self.weight_bytes, self.writing_s)

    def simulated(self, constants: Constants) -> list[dict[str, float]]:
        """Return the simulated seconds of the parts of every step."""
        works = [step.work for step in self.steps]
        run, config = self.generation, self.config
        return predict(works, run.steps, constants, run.speed, config.bubbles.use, config.engine.max_num_seqs)


@dataclass(frozen=True)
class PartComparison:
    """One part, or the whole step, of all steps of a run."""

    part: str
    measured: tuple[float, ...]
    """The seconds in each step."""
    simulated: tuple[float, ...]

    @property
    def name(self) -> str:
        """The part in words."""
        return self.part.replace("_", " ")

    @property
    def error(self) -> float:
        """The relative error of the sum over the steps; 0 where there is nothing."""
        return sum(self.simulated) / sum(self.measured) - 1 if sum(self.measured) else 0.0

    @property
    def step_error(self) -> float:
        """The median of the steps' own relative errors, without their signs."""
        pairs = zip(self.simulated, self.measured, strict=True)
        return median(abs(simulated / measured - 1) if measured else 0.0 for simulated, measured in pairs)

    def as_json(self) -> dict[str, Any]:
        """Return the sums over the steps in seconds, and the errors."""
        return {
            "part": self.part,
            "measured_s": sum(self.measured),
            "simulated_s": sum(self.simulated),
            "error": self.error,
            "median_step_error": self.step_error,
        }


def halves(run: RunSteps) -> list[PartComparison]:
    """Simulate each half of a run's steps by constants of the other half.

    Raises:
        ValueError: The run has too few steps.
    """
    number = len(run.steps)
    if number < LEAST_STEPS:
        raise ValueError(f"whole steps are compared from {LEAST_STEPS} steps on: the run has {number}")
    middle = number // 2
    first = run.simulated(run.constants(run.steps[middle:]))[:middle]
    second = run.simulated(run.constants(run.steps[:middle]))[middle:]
    return compare(run.steps, [*first, *second])


def transferred(run: RunSteps, other: RunSteps) -> list[PartComparison]:
    """Simulate a run's steps by the constants of another run.

    Raises:
        ValueError: Something beside work and data tells the two apart, so that constants of one are none of the other.
    """
    for name, one, two in _same(run.config, other.config):
        if one != two:
            raise ValueError(f"{other.name} cannot calibrate {run.name}: {name} is {two}, not {one}")
    return compare(run.steps, run.simulated(other.constants(other.steps)))


def compare(steps: Sequence[MeasuredStep], simulated: Sequence[dict[str, float]]) -> list[PartComparison]:
    """Return the comparison of each part and, as the last one, of the whole step."""
    found = [
        PartComparison(part, tuple(s.seconds[part] for s in steps), tuple(item[part] for item in simulated))
        for part in PARTS
    ]
    whole = PartComparison(
        "step", tuple(s.seconds["step"] for s in steps), tuple(sum(item.values()) for item in simulated)
    )
    return [*found, whole]


def causes(steps: Sequence[MeasuredStep], part: PartComparison) -> str:
    """Return which steps the differences of a part are mostly from, with what is known of each."""
    differences = [s - m for s, m in zip(part.simulated, part.measured, strict=True)]
    total = sum(map(abs, differences))
    named = []
    for step, difference in zip(steps, differences, strict=True):
        if abs(difference) < NAMED_SHARE * total:
            continue
        known = [text for holds, text in _conditions(step) if holds]
        named.append(f"step {step.work.step} by {difference:+.2f} s" + (f" ({', '.join(known)})" if known else ""))
    return "; ".join(named) or "no step has much more of it than others"


def gaps(steps: Sequence[MeasuredStep], constants: Constants) -> list[str]:
    """Return which kinds of steps were simulated that the constants know nothing of, a line for each."""
    works, refit, saving = [step.work for step in steps], constants.refit, constants.checkpoint
    known = (
        (refit.with_it is None and any(work.probes for work in works), "a refit with the drafter's probe"),
        (refit.without is None and not all(work.probes for work in works), "a refit without the drafter's probe"),
        (saving.with_it is None and any(work.saves for work in works), "a copy for a checkpoint"),
        (constants.merge_s is None and any(work.merges for work in works), "a merge of drafters trained in idle time"),
    )
    return [f"not measured by the run that calibrates: {text}" for missing, text in known if missing]


def assumptions(constants: Constants) -> list[str]:
    """Return what a simulation of whole steps assumes, a line for each."""
    curve, (fixed, flop_s) = constants.curve, constants.drafter_s
    return [
        "lengths, drafts and accepted tokens of responses, groups with signal, probes of the drafter and its training "
        "in idle time are the run's own; no step's time is simulated with its own seconds",
        f"an iteration takes {curve.iteration_s * 1e3:.1f} ms and {curve.row_s * 1e3:.2f} ms for each row; beside a "
        f"checkpoint's writing a step takes {constants.writing_s:.1f} s more",
        f"the update reads and writes at the rate of an iteration's weights and computes {1e-9 / constants.flop_s:.0f} "
        "GFLOP/s on each rank"
        if constants.flop_s
        else "the update computes nothing",
        f"the drafter's update takes {fixed:.2f} s beside its operations"
        + (f", at {1e-9 / flop_s:.0f} GFLOP/s on each rank" if flop_s else ""),
    ]


def _conditions(step: MeasuredStep) -> tuple[tuple[bool, str], ...]:
    work = step.work
    return (
        (work.step == 0, "the first one, which warms up"),
        (work.beside_checkpoint, "beside the writing of a checkpoint"),
        (work.trained_tokens == 0, "no group has signal"),
    )


def _same(one: Config, two: Config) -> list[tuple[str, object, object]]:
    """Return the settings on which constants depend, with the values of both runs."""
    return [
        ("model.source", one.model.source, two.model.source),
        ("policy.tensor_parallel", one.policy.tensor_parallel, two.policy.tensor_parallel),
        ("engine.tensor_parallel", one.engine.tensor_parallel, two.engine.tensor_parallel),
        ("precision.generation", one.precision.generation, two.precision.generation),
        ("precision.training", one.precision.training, two.precision.training),
    ]
