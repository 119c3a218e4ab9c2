"""The trainings of a group of cells, which take one step each in turn, with all ranks on this machine.

A rank takes a step only when told to, so that nothing else computes while a step is timed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from specrl.artifacts import PretrainResult, read_result, write_result
from specrl.bench.cells import Cell, config_of
from specrl.bench.job import Subject, say
from specrl.bench.spread import order_of
from specrl.config import ConfigError
from specrl.context import StageContext
from specrl.keys import code_digest
from specrl.models.drafters import fetch_source
from specrl.processes import LOOPBACK, free_port, start_helper
from specrl.training.drafter.io import adopt_drafter

CONTEXT_FILE = "context.json"
ROOT = Path(__file__).parents[2]


class Worker:
    """A rank of a training, as its parent sees it; ready after its first answer."""

    def __init__(self, training: Training, rank: int, port: int) -> None:
        """Start `specrl.bench.run.rank`, on its own cores if there are enough."""
        resources, folder = training.context.config.resources_of("train"), training.folder.parent
        threads = resources.cpus_per_rank
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": resources.ranks, "MASTER_PORT": port}
        names |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        environment = {**os.environ, **{name: str(value) for name, value in names.items()}, "MASTER_ADDR": LOOPBACK}
        self.name, self.log = f"rank {rank} of {training.cell.label}", folder / f"rank-{rank}.log"
        with self.log.open("w") as output:
            context = [folder / CONTEXT_FILE]
            self.process, self.answers = start_helper("specrl.bench.run.rank", environment, output, send=context)
        own = sorted(os.sched_getaffinity(0))[rank * threads : (rank + 1) * threads]
        if len(own) == threads:
            os.sched_setaffinity(self.process.pid, own)

    def await_answer(self) -> None:
        """Wait until the process is ready or has taken its step."""
        try:
            self.answers.recv()
        except (EOFError, OSError):
            killed = self.process.wait() == -signal.SIGKILL
            why = " (it was killed, as Linux does where memory is short)" if killed else ""
            raise RuntimeError(f"{self.name} ended before its step{why}; log: {self.log}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.process.kill()
        self.answers.close()
        self.process.wait()


def await_all(workers: Sequence[Worker]) -> None:
    """Wait until all processes are ready or have taken their step.

    Fail as soon as one has ended: the others may be waiting for it and would never answer.
    """
    waiting: dict[Any, Worker] = {worker.answers: worker for worker in workers}
    while waiting:
        for answers in wait(list(waiting)):
            waiting.pop(answers).await_answer()


@dataclass
class Training:
    """The training of one cell, and its progress."""

    cell: Cell
    context: StageContext
    workers: list[Worker] = field(default_factory=list)  # its ranks
    start_s: float = 0.0  # until all ranks were loaded; nothing else ran meanwhile
    walls: list[float] = field(default_factory=list)  # seconds of each step, by the slowest rank

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

    def start(self, stack: ExitStack) -> None:
        """Start the ranks and wait until they have loaded everything."""
        began, port, ranks = time.monotonic(), free_port(), self.context.config.resources_of("train").ranks
        self.workers = [stack.enter_context(Worker(self, rank, port)) for rank in range(ranks)]
        await_all(self.workers)
        self.start_s = time.monotonic() - began

    def step(self) -> None:
        began = time.monotonic()
        for worker in self.workers:
            worker.answers.send(None)  # start its step
        await_all(self.workers)
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
        for worker in (worker for training in trainings for worker in training.workers):
            worker.answers.close()  # all ranks of a training leave together
