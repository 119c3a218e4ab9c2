"""The trainings of `specrl bench run`: one for each use, which take a step each in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from specrl.artifacts import PretrainResult, read_result
from specrl.bench.bubbles.runs import with_drafter
from specrl.bench.interleaved.energy import EnergyMeter
from specrl.bench.interleaved.side import TrainSide, TrainStep, begin_anew, train_side
from specrl.bench.job import BenchJob, say
from specrl.bench.precision.runs import find_inputs
from specrl.bench.run.settings import PRETRAINED, TRAINED, Precision, RunSettings
from specrl.config import ConfigError
from specrl.context import StageContext


@dataclass(frozen=True)
class UseRun:
    """The training of one use, as far as it has come."""

    name: str
    precision: Precision
    context: StageContext
    start_s: float
    """The wall time until its ranks had loaded everything, in seconds. Nothing else was started beside them."""
    steps: list[TrainStep] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    """The energy of the whole machine during each step; empty where it has no counter."""

    @property
    def rollouts_dir(self) -> Path:
        """The folder of the rollouts of all steps."""
        return self.context.stage_dir / "rollouts"

    @property
    def end_to_end_s(self) -> float:
        """The wall time of the training: its start, and all steps with their validations."""
        return self.start_s + sum(step.wall_s for step in self.steps)

    @property
    def tokens(self) -> int:
        """The number of response tokens of all steps."""
        return sum(step.tokens for step in self.steps)


def make_context(job: BenchJob, folder: Path, name: str, precision: Precision, settings: RunSettings) -> StageContext:
    """Return the train stage of the run with this use and precision, in a folder of its own.

    Raises:
        ConfigError: The run has not finished the stages before RL, or there is no such drafter.
    """
    inputs = find_inputs(job.run_dir)
    if settings.drafter != PRETRAINED:
        drafter_dir = job.subject.drafter_dir if settings.drafter == TRAINED else Path(settings.drafter)
        if drafter_dir is None:
            raise ConfigError(f"drafter = {settings.drafter}: run {job.run_dir.name} has not trained one")
        inputs["pretrain"] = with_drafter(inputs["pretrain"], drafter_dir, folder.parent / "pretrain")
    return StageContext(
        config=settings.config_of(job.config, folder, name, precision),
        stage="train",
        key=f"train-{folder.name}",
        stage_dir=folder / "stage",
        inputs=inputs,
        mlflow_run_id="",
    )


def train_in_turn(
    contexts: Mapping[str, StageContext], precision: Precision, num_steps: int, meter: EnergyMeter
) -> dict[str, UseRun]:
    """Start the training of each use, one after the other, and have them take a step each in turn.

    Each round begins with another use, so that none is always the first.

    Args:
        contexts: The train stage of each use by its name, in folders that are made anew.

    Raises:
        RuntimeError: A rank failed; the message names its log.
    """
    with ExitStack() as stack:
        sides: dict[str, TrainSide] = {}
        runs: dict[str, UseRun] = {}
        for name in start_order(list(contexts)):
            context = contexts[name]
            folder = context.stage_dir.parent
            begin_anew(context, folder)
            began = time.monotonic()
            sides[name] = stack.enter_context(train_side(context, folder))
            runs[name] = UseRun(name, precision, context, time.monotonic() - began)
        runs = {name: runs[name] for name in contexts}
        for step in range(num_steps):
            for name in order_of(list(contexts), step):
                meter.lap()
                runs[name].steps.append(sides[name].step())
                joules = meter.lap()
                runs[name].joules.extend([joules] if joules is not None else [])
            words = ", ".join(f"{name} {run.steps[-1].seconds('step'):.1f} s" for name, run in runs.items())
            say(f"{precision}, step {step}: {words}")
    return runs


def start_order(names: Sequence[str]) -> list[str]:
    """Return the names in the order in which their ranks start: plain decoding, which comes first, starts last.

    The first to start reads files that are not cached yet. This must not count as a gain over plain decoding.
    """
    return [*names[::-1]]


def order_of(names: Sequence[str], step: int) -> list[str]:
    """Return the names in the order of a round: each begins with the next name, and after all have, it is reversed."""
    first = step % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if step // len(names) % 2 else order


def pretraining_s(run_dir: Path) -> float:
    """Return how long the run's stage `pretrain` took, which made the drafter, in seconds."""
    return read_result(find_inputs(run_dir)["pretrain"], PretrainResult).seconds
