"""specrl's side of a comparison by steps: the train stage of a context, with all of its ranks on this machine."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from specrl.bench.interleaved.turns import Worker, answers_of
from specrl.context import StageContext
from specrl.processes import LOOPBACK, free_port
from specrl.schemas import Rollout, read_rollouts

CONTEXT_FILE = "context.json"
PARTS = ("generation", "policy_update", "drafter_update", "refit", "checkpoint")
"""The parts of a step of which the tables say how long they took; what is left is `other`."""


@dataclass(frozen=True)
class TrainStep:
    """One step of the train stage."""

    step: int
    metrics: dict[str, float]
    """Those of the step's record, under their MLflow names."""
    prompts: int
    """The number of prompts in a step."""
    samples: int
    """The number of responses to a prompt."""
    peak_gib: float
    """The largest resident memory of all ranks together during the step, in GiB."""
    held_gib: float
    """Their resident memory after it, in GiB."""
    cpu_s: float
    """The CPU time of all ranks together during the step, in seconds; without that of their reward workers."""
    wall_s: float
    """The wall time from the order to take the step until the last rank has taken it, in seconds. It includes the
    writing of a checkpoint, which a run does beside its next step."""

    def seconds(self, part: str) -> float:
        """Return the wall time of a part, or of the whole `step`; 0 for a part that the step did not have."""
        return self.metrics.get(f"timing/{part}_s", 0.0)

    def rollouts(self, rollouts_dir: Path) -> list[Rollout]:
        """Return the rollouts of the step, those of all ranks."""
        files = sorted((rollouts_dir / f"step={self.step:06d}").glob("rank-*.arrow"))
        return [rollout for file in files for rollout in read_rollouts(file)]

    @property
    def other_s(self) -> float:
        """The seconds that belong to none of `PARTS`."""
        return self.seconds("step") - sum(map(self.seconds, PARTS))

    @property
    def tokens(self) -> int:
        """The number of response tokens that the step generated and, as no group is left out, trained on."""
        mean = self.metrics["rollout/response_length_mean"]
        return round(mean * self.prompts * self.samples)


class TrainSide:
    """The ranks of a train stage, which take a step together."""

    def __init__(self, context: StageContext, workers: list[Worker]) -> None:
        self.context, self._workers = context, workers

    def step(self) -> TrainStep:
        """Take one step, and return what it left."""
        began = time.monotonic()
        for worker in self._workers:
            worker.begin_step()
        answers = answers_of(self._workers)
        wall_s = time.monotonic() - began
        train = self.context.config.train
        # The record itself is of a class whose module imports vLLM.
        record = json.loads(max((self.context.stage_dir / "steps").glob("step=*.json")).read_text())
        return TrainStep(
            record["step"],
            record["metrics"],
            train.prompts_per_step,
            train.samples_per_prompt,
            peak_gib=sum(answer["peak_gib"] for answer in answers),
            held_gib=sum(answer["held_gib"] for answer in answers),
            cpu_s=sum(answer["cpu_s"] for answer in answers),
            wall_s=wall_s,
        )


def begin_anew(context: StageContext, folder: Path) -> Path:
    """Remove what an earlier call left in a folder, write the context into it, and return the context's file."""
    shutil.rmtree(folder, ignore_errors=True)
    path = folder / CONTEXT_FILE
    context.save(path)
    return path


@contextmanager
def train_side(context: StageContext, folder: Path) -> Iterator[TrainSide]:
    """Start the ranks of a train stage, each with its own cores where there are enough, and wait for them.

    Args:
        folder: The logs of the ranks go there, beside the context.
    """
    resources = context.config.resources_of("train")
    port = free_port()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(_start(folder, rank, resources.ranks, resources.cpus_per_rank, port))
            for rank in range(resources.ranks)
        ]
        answers_of(workers)
        yield TrainSide(context, workers)
        for worker in workers:  # all ranks leave together
            worker.end()


def _start(folder: Path, rank: int, ranks: int, threads: int, port: int) -> Worker:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port, "MASTER_ADDR": LOOPBACK}
    names |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    worker = Worker(
        f"rank {rank} of specrl",
        ["specrl.bench.interleaved.rank", str(folder / CONTEXT_FILE)],
        {name: str(value) for name, value in names.items()},
        folder / f"rank-{rank}.log",
    )
    cores = sorted(os.sched_getaffinity(0))
    own = cores[rank * threads : (rank + 1) * threads]
    if len(own) == threads:
        os.sched_setaffinity(worker.pid, own)
    return worker
