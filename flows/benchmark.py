"""Benchmarks, in a process of this machine, or as jobs: cells side by side, each measured once.

What has finished is kept, whatever becomes of the command: when it is called again, finished cells are skipped and jobs
that still run are found. A cell that fails leaves the others alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from rich.console import Console

from flows.folder import only_flow, write_config
from slurm.access import restrict
from slurm.backend import JobError
from slurm.environment import THREAD_VARIABLES, snapshot_code
from slurm.failures import last_error
from slurm.registry import backend_of
from specrl.bench.job import JOB_FILE, BenchJob
from specrl.config import Config, ConfigError, Resources
from specrl.tracking import log_cell
from tasks.cells import CellJob, measure
from tasks.run import end_jobs, forget_stop


def run_here(job: BenchJob, resources: Resources | None, label: str, minutes: int | None = None) -> None:
    """Run a benchmark in a process of its own, and wait for it, `minutes` at most. Its log is LABEL.log in its folder.

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
        try:
            limit = None if minutes is None else 60 * minutes
            code = subprocess.run(process, env=environment, stderr=errors, check=False, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            raise JobError(f"bench {job.name} took longer than {minutes} minutes; log: {log}") from None
    if code:
        error = last_error(log.read_text(errors="replace")) or f"it ended with code {code} and without a word"
        raise JobError(f"bench {job.name} failed: {error}; log: {log}")


def measure_cells(cells: Sequence[CellJob], config: Config, at_once: int) -> dict[str, str]:
    """Measure every cell in a job of its own, and record each in MLflow as soon as it has finished or failed.

    Args:
        config: The configuration of the run that is measured.
        at_once: The largest number of jobs that wait or run at the same time.

    Returns:
        The errors of the cells that failed, by their labels.
    """
    from flows.display import PlainReporter  # imports Prefect, which the command line does without

    of_jobs = cells[0].context.config
    backend = backend_of(of_jobs.cluster_of("bench"))
    restrict(of_jobs.cluster)
    if problems := backend.problems(of_jobs):
        raise ConfigError("\n".join(problems))
    reporter = PlainReporter(Console(stderr=True, highlight=False, soft_wrap=True))
    errors: dict[str, str] = {}
    with only_flow(of_jobs.run_dir), ThreadPoolExecutor(at_once) as threads:
        forget_stop(of_jobs.run_dir)
        write_config(of_jobs)
        code = snapshot_code(of_jobs.run_dir)
        try:
            futures = {threads.submit(measure, cell, code, reporter): cell for cell in cells}
            for future in as_completed(futures):
                cell, error = futures[future], future.result()
                record(config, cell, error)
                errors |= {cell.label: error} if error is not None else {}
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            end_jobs(of_jobs.run_dir, reporter.note)  # running threads then find that they were asked to stop
            raise
    return errors


def record(config: Config, cell: CellJob, error: str | None) -> None:
    job = cell.job
    tags = {"specrl.key": cell.context.key, "specrl.run": config.name, "mlflow.source.name": job.command}
    params = {"benchmark": job.name, "run": config.name, "cell": cell.label, **job.options}
    rows = cell.rows() if error is None else []
    files = [job.page, job.json_path] if error is None else []
    log_cell(config, cell.folder, cell.label, tags, params, rows, files, error)


def join_rows(cells: Sequence[CellJob]) -> list[dict[str, Any]]:
    """The rows of all cells that have finished; that of a baseline, which several have, once."""
    found: dict[Any, dict[str, Any]] = {}
    for row in (row for cell in cells if cell.is_finished for row in cell.rows()):
        found.setdefault((row["cell"], row.get("seed")), row)
    return list(found.values())
