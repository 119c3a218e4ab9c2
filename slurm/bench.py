"""The process of a benchmark, which a command starts on this machine, and a job on its node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slurm.backend import JobError
from slurm.environment import THREAD_VARIABLES
from slurm.failures import last_error
from specrl.artifacts import Artifact, write_result
from specrl.bench.job import BenchJob
from specrl.config import Resources
from specrl.context import StageContext

ENTRY = "slurm.bench:main"
"""The function of a job that runs a benchmark."""
JOB_FILE, PAGE_FILE = "job.json", "page.md"
"""The files in the folder of a job's results: what to run, and the page, with the rows beside it."""
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables of a job's rank, which a benchmark must not take for those of its own ranks."""


class BenchResult(Artifact):
    """The result of a job that runs a benchmark. Rows and page lie beside it."""

    seconds: float


def main(context: StageContext) -> None:
    """Run the benchmark whose `job.json` lies in the folder of results, and write `result.json` last.

    Raises:
        JobError: It failed.
    """
    started = time.monotonic()
    path = context.stage_dir / JOB_FILE
    job = BenchJob.load(path)
    environment = bench_environment(context.config.resources_of("bench"))
    run_bench(job, path, {name: value for name, value in environment.items() if name not in OF_RANKS})
    write_result(context.stage_dir, BenchResult(seconds=time.monotonic() - started))


def run_bench(job: BenchJob, path: Path, environment: Mapping[str, str]) -> None:
    """Run a benchmark in a process of its own, and wait for it.

    Args:
        path: The job file, which is written; the log lies beside it.

    Raises:
        JobError: It failed; the message has its error and its log.
    """
    job.save(path)
    log = path.with_suffix(".log")
    with log.open("wb") as errors:
        process = [sys.executable, "-m", "specrl.bench.job", str(path), str(os.getpid())]
        code = subprocess.run(process, env=environment, stderr=errors, check=False).returncode
    if code:
        error = last_error(log.read_text(errors="replace")) or f"it ended with code {code} and without a word"
        raise JobError(f"bench {job.name} failed: {error}; log: {log}")


def bench_environment(resources: Resources | None) -> dict[str, str]:
    """Return the environment of a benchmark's process, with the threads and the devices of a rank.

    Args:
        resources: The rank's resources; None for all cores and devices of this machine.
    """
    cores = len(os.sched_getaffinity(0))
    count = str(cores if resources is None else min(resources.cpus_per_rank, cores))
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, count), "TOKENIZERS_PARALLELISM": "false"}
    if resources is not None and not resources.gpus_per_rank:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
