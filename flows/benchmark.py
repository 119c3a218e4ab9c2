"""Benchmarks, in a process of this machine, or as jobs: cells side by side, each measured once.

What has finished is kept, whatever becomes of the command: when it is called again, finished cells are skipped and jobs
that still run are found. A cell that fails leaves the others alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console

from flows.folder import only_flow, write_config
from slurm.access import restrict
from slurm.backend import JobError
from slurm.environment import THREAD_VARIABLES, snapshot_code
from slurm.failures import last_error
from slurm.registry import backend_of
from specrl.bench.job import JOB_FILE, BenchJob
from specrl.config import ConfigError, Resources
from tasks.cells import CellJob, measure
from tasks.run import end_jobs, forget_stop


def run_here(job: BenchJob, resources: Resources | None, label: str) -> None:
    """Run a benchmark in a process of its own, and wait for it. Its log, LABEL.log, lies in its folder.

    Args:
        resources: Those of a rank; None for all devices of this machine, and OMP_NUM_THREADS or all cores.

    Raises:
        JobError: It failed; the message has its error and its log.
    """
    cores, path, log = len(os.sched_getaffinity(0)), job.folder / JOB_FILE, job.folder / f"{label}.log"
    count = os.environ.get("OMP_NUM_THREADS", str(cores))
    if resources is not None:
        count = str(min(resources.cpus_per_rank, cores))
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, count), "TOKENIZERS_PARALLELISM": "false"}
    if resources is not None and not resources.gpus_per_rank:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    job.save(path)
    with log.open("wb") as errors:
        process = [sys.executable, "-m", "specrl.bench.job", str(path), str(os.getpid())]
        code = subprocess.run(process, env=environment, stderr=errors, check=False).returncode
    if code:
        error = last_error(log.read_text(errors="replace")) or f"it ended with code {code} and without a word"
        raise JobError(f"bench {job.name} failed: {error}; log: {log}")


def measure_cells(cells: Sequence[CellJob], at_once: int) -> dict[str, str]:
    """Measure every cell in a job of its own.

    Args:
        at_once: The largest number of jobs that wait or run at the same time.

    Returns:
        The errors of the cells that failed, by their labels.
    """
    from flows.display import PlainReporter  # imports Prefect, which the command line does without

    of_jobs = cells[0].context.config
    backend = backend_of(of_jobs.cluster_of("bench"))
    restrict(of_jobs.cluster)
    backend.connect()
    if problems := backend.problems(of_jobs):
        raise ConfigError("\n".join(problems))
    reporter = PlainReporter(Console(highlight=False, soft_wrap=True))
    with only_flow(of_jobs.run_dir), ThreadPoolExecutor(at_once) as threads:
        forget_stop(of_jobs.run_dir)
        write_config(of_jobs)
        code = snapshot_code(of_jobs.run_dir)
        try:
            errors = list(threads.map(lambda cell: measure(cell, code, reporter), cells))
        except KeyboardInterrupt:
            end_jobs(of_jobs.run_dir, reporter.note)  # the threads then find that they were asked to stop
            raise
    return {cell.label: error for cell, error in zip(cells, errors, strict=True) if error is not None}


def join_rows(cells: Sequence[CellJob]) -> list[dict[str, Any]]:
    """Return the rows of all cells that have finished; that of a baseline, which several have, once."""
    found: dict[Any, dict[str, Any]] = {}
    for row in (row for cell in cells if cell.is_finished for row in json.loads(cell.job.json_path.read_text())):
        found.setdefault((row["cell"], row.get("seed")), row)
    return list(found.values())
