"""`specrl bench checkpoints`: measure, then write the rows and the page."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specrl.artifacts import TrainResult
from specrl.bench.checkpoints.page import CheckpointCosts, write_page
from specrl.bench.job import BenchJob
from specrl.bench.pages import write_rows
from specrl.bench.settings import CheckpointSettings
from specrl.bench.subject import Subject
from specrl.distributed import join, leave
from specrl.report.results import find_stages, finished
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.checkpoint.load import TrainState
from specrl.training.megatron.policy import Policy

RESPONSE_TOKENS = 64
"""The tokens of a sequence of the work that goes on beside the writing."""


def main(job: BenchJob) -> None:
    """Measure saving, writing and loading on one rank, and write the rows and the page.

    Raises:
        ConfigError: The run has not trained yet.
    """
    settings, subject = CheckpointSettings.model_validate(job.settings), job.subject
    trained = finished(find_stages(job.run_dir), "train", TrainResult)
    assert trained is not None, "a subject has trained"
    join()
    with scratch(job.folder) as folder:
        costs = measure(subject, settings, folder)
    write_rows(job.json_path, [vars(cost) for cost in costs])
    write_page(job, costs, trained.step_seconds_median)
    leave()


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, and remove it at the end: it holds gigabytes that nobody reads again."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def measure(subject: Subject, settings: CheckpointSettings, folder: Path) -> list[CheckpointCosts]:
    """Return what each of `repeats` checkpoints cost; forward passes stand for the generation beside the writing."""
    alone = subject.config.policy.model_copy(update={"tensor_parallel": 1, "pipeline_parallel": 1})
    policy = Policy(subject.policy_dir, alone, dtype=subject.config.model.dtype, ranks=join(), seed=0)
    batches = random_batches(policy.vocab_size)
    policy.train_step(batches[:1], mean_loss, lr=0.0)  # or the moments would be zeros that take no memory
    checkpoints = Checkpoints(folder, policy, Retention(1))
    passes = max(1, round(settings.work_seconds / seconds_of(lambda: policy.logprobs(batches))))

    def work() -> None:
        for _ in range(passes):
            policy.logprobs(batches)

    costs = []
    for step in range(settings.repeats):
        work_alone = seconds_of(work)
        saved = seconds_of(partial(checkpoints.save, TrainState(step, policy, None)))
        work_beside = seconds_of(work)
        checkpoints.wait()
        blocking = seconds_of(partial(checkpoints.save, TrainState(step, policy, None))) + seconds_of(checkpoints.wait)
        loaded = seconds_of(lambda: checkpoints.restore(None))
        size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        costs.append(CheckpointCosts(size, saved, blocking, work_alone, work_beside, loaded))
    return costs


def random_batches(vocab_size: int) -> list[MicroBatch]:
    """Return a few micro-batches of random tokens."""
    generator = random.Random(0)
    rows = [[generator.randrange(vocab_size) for _ in range(RESPONSE_TOKENS)] for _ in range(8)]
    return pack([TokenSequence(row, 1, index) for index, row in enumerate(rows)], 4 * RESPONSE_TOKENS)


def mean_loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss that gives every parameter a gradient."""
    return -logprobs[batch.mask].mean(), {}


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long `work` takes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
