"""The trainings of a group of cells, which take one step each in turn, with all ranks on this machine.

A rank takes a step only when told to, so that nothing else computes while a step is timed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from specrl.artifacts import PretrainResult, read_result, write_result
from specrl.bench.cells import Cell, config_of
from specrl.bench.job import Subject, say
from specrl.bench.pages import order_of
from specrl.bench.workers import Workers
from specrl.config import ConfigError
from specrl.context import StageContext
from specrl.keys import code_digest
from specrl.models.drafters import fetch_source
from specrl.training.drafter.io import adopt_drafter

CONTEXT_FILE = "context.json"
ROOT = Path(__file__).parents[2]


@dataclass
class Training:
    """The training of one cell, and its progress."""

    cell: Cell
    context: StageContext
    workers: Workers | None = None  # its ranks
    start_s: float = 0.0  # until all ranks were loaded; nothing else ran meanwhile
    walls: list[float] = field(default_factory=list)  # seconds of each step, by the slowest rank
    used_gib: float = 0.0  # the most that has been in use of any GPU since the start; 0 on CPUs

    @property
    def folder(self) -> Path:
        return self.context.stage_dir

    def metrics(self) -> list[dict[str, float]]:
        files = sorted((self.folder / "steps").glob("step=*.json"))
        return [json.loads(path.read_text())["metrics"] for path in files]

    def was_taken(self, steps: int) -> bool:
        """Whether an earlier command took all steps with the same configuration and code."""
        path = self.folder.parent / CONTEXT_FILE
        return path.exists() and StageContext.load(path) == self.context and len(self.metrics()) >= steps

    def start(self, stack: ExitStack, acceptance: float | None = None) -> None:
        """Start the ranks and wait until they have loaded everything.

        With `acceptance`, each token of a draft is accepted at this rate, whatever the policy would sample.
        """
        began, folder, resources = time.monotonic(), self.folder.parent, self.context.config.resources_of("train")
        place, send = (folder, resources.ranks, resources.cpus_per_rank), (folder / CONTEXT_FILE, acceptance)
        self.workers = stack.enter_context(Workers("specrl.bench.run.rank", self.cell.label, *place, *send))
        self.workers.answers()
        self.start_s = time.monotonic() - began

    def step(self) -> None:
        assert self.workers is not None
        began = time.monotonic()
        self.used_gib = max(self.workers.tell())
        self.walls.append(time.monotonic() - began)


def make_training(
    subject: Subject, cell: Cell, folder: Path, steps: int, validate_every: int, sharers: int
) -> Training:
    """Prepare a cell's training in a folder, starting from the run's policy and drafter before RL."""
    if "calibrate" not in subject.stages:
        raise ConfigError("the run has not finished calibrate; continue it with: specrl resume RUN")
    config = config_of(subject.config, cell, steps, validate_every, sharers)
    inputs = dict(subject.stages)
    adopts = config.adopts_drafter and config.drafter.source != subject.config.drafter.source
    if adopts:
        inputs["pretrain"] = folder / "pretrain"
    context = StageContext(
        config=config.model_copy(update={"name": folder.name, "runs_dir": folder.parent}),
        stage="train",
        key=f"train-{code_digest(ROOT)}",
        stage_dir=folder / "stage",
        inputs=inputs,
        mlflow_run_id="",
    )
    training = Training(cell, context)
    if sharers == 1 and training.was_taken(steps):
        return training
    shutil.rmtree(folder, ignore_errors=True)
    if adopts:
        adopt_drafter(fetch_source(config), subject.first_policy_dir, folder / "drafter")
        result = read_result(subject.stages["pretrain"], PretrainResult)
        write_result(inputs["pretrain"], result.model_copy(update={"drafter_dir": folder / "drafter"}))
    context.save(folder / CONTEXT_FILE)
    return training


def train_in_turn(trainings: Sequence[Training], steps: int) -> None:
    """Start trainings one after the other, then have them take one step each in turn.

    The baseline, which is first in the list, starts last: the first to start reads uncached files, which must not count
    as a speedup of the others.
    """
    with ExitStack() as stack:
        for training in reversed(trainings):
            training.start(stack)
        for step in range(steps):
            for place in order_of(len(trainings), step):
                trainings[place].step()
            say(f"step {step}: " + ", ".join(f"{one.cell.label} {one.walls[-1]:.1f} s" for one in trainings))
