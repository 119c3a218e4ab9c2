"""Benchmarks as jobs: the cells of a command side by side, each measured once and recorded in MLflow.

What has finished is kept, whatever becomes of the command: when it is called again, finished cells are skipped and jobs
that still run are found. A cell that fails leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from rich.console import Console

from flows.folder import only_flow, write_config
from slurm.access import restrict
from slurm.backend import JobError
from slurm.environment import snapshot_code
from slurm.registry import backend_of
from specrl.config import Config, ConfigError
from specrl.tracking import benchmark_config, log_cell
from tasks.cells import CellJob, measure
from tasks.run import end_jobs, forget_stop


def measure_cells(cells: Sequence[CellJob], config: Config, at_once: int) -> dict[str, str]:
    """Measure every cell in a job of its own, and record each in MLflow as soon as it has finished or failed.

    Args:
        config: The configuration of the run that is measured; without a run, that of the jobs alone.
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
    failed = {}
    with only_flow(of_jobs.run_dir), ThreadPoolExecutor(at_once) as threads:
        forget_stop(of_jobs.run_dir)
        write_config(of_jobs)
        code = snapshot_code(of_jobs.run_dir)
        futures = {threads.submit(measure, cell, code, reporter): cell for cell in cells}
        try:
            for future in as_completed(futures):
                cell, error = futures[future], future.result()
                record(benchmark_config(config), cell, error)
                if error is not None:
                    failed[cell.label] = error
        except KeyboardInterrupt:
            end_jobs(of_jobs.run_dir, reporter.note)  # the threads then find that they were asked to stop
            raise
    return failed


def record(tracked: Config, cell: CellJob, error: str | None) -> None:
    """Record a cell that has finished or failed in MLflow.

    Args:
        tracked: The configuration of the experiment of benchmarks.
    """
    job, done = cell.job, error is None
    options = {name: value for name, value in job.options.items() if value is not None}
    changes = dict(change.split("=", 1) for change in job.changes)
    log_cell(
        tracked,
        cell.folder,
        name=cell.label,
        tags={"specrl.key": cell.context.key, "specrl.run": tracked.name, "mlflow.source.name": job.command},
        params={"benchmark": job.name, "run": tracked.name, "cell": cell.label, **options, **changes},
        rows=cell.rows() if done else [],
        files={"": [job.page, job.json_path] if done else []},
        error=error,
    )


def check(failed: dict[str, str], name: str, count: int) -> None:
    """Raise what became of the cells that failed.

    Raises:
        JobError: Some failed.
    """
    if failed:
        reasons = "; ".join(f"{label}: {error}" for label, error in failed.items())
        raise JobError(f"{len(failed)} of {count} jobs of bench {name} failed: {reasons}")


def join_rows(cells: Sequence[CellJob]) -> list[dict[str, Any]]:
    """Return the rows of all cells that have finished; that of a baseline, which several have, once."""
    found: dict[Any, dict[str, Any]] = {}
    for row in (row for cell in cells if cell.is_finished for row in cell.rows()):
        found.setdefault((row["cell"], row.get("seed")), row)
    return list(found.values())
