"""Benchmarks as jobs: what `specrl bench ... --cluster` submits, and what becomes of the results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from flows.folder import only_flow, write_config
from flows.server import PrefectServer, mark_crashed_flows
from slurm.access import restrict
from slurm.backend import JobError
from slurm.environment import snapshot_code
from slurm.registry import backend_of
from specrl.artifacts import write_text
from specrl.bench.job import BenchJob
from specrl.config import Config, ConfigError
from specrl.tracking import benchmark_config, log_cell
from tasks.cells import CellJob
from tasks.run import forget_stop


def measure_cells(cells: list[CellJob], config: Config, at_once: int) -> dict[str, str]:
    """Measure every cell in a job of its own, and record each in MLflow as soon as it has finished or failed.

    Args:
        config: The configuration of the run that is measured; without a run, that of the jobs alone.
        at_once: The largest number of jobs that wait or run at the same time.

    Returns:
        The errors of the cells that failed, by their labels.
    """
    of_jobs = cells[0].context.config
    folder = of_jobs.run_dir
    backend = backend_of(of_jobs.cluster_of("bench"))
    restrict(of_jobs.cluster)
    backend.connect()
    if problems := backend.problems(of_jobs):
        raise ConfigError("\n".join(problems))
    with only_flow(folder), PrefectServer(config.runs_dir) as server:
        forget_stop(folder)
        write_config(of_jobs)
        code = snapshot_code(folder)
        server.wait()
        from flows.benchmark import run_flow  # imports Prefect, which reads its environment once, at import

        mark_crashed_flows(folder)
        errors = run_flow(folder, cells, code, at_once, partial(record, benchmark_config(config)))
    return {cell.label: error for cell, error in zip(cells, errors, strict=True) if error is not None}


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
        files={"": [job.page, job.json_path, job.json_path.with_suffix(".arrow")] if done else []},
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


def copy_results(cell: CellJob, job: BenchJob) -> None:
    """Copy page and rows of a cell to where the user wants them."""
    write_text(job.page, cell.job.page.read_text())
    write_text(job.json_path, cell.job.json_path.read_text())


def join_rows(cells: Sequence[CellJob]) -> list[dict[str, Any]]:
    """Return the rows of all cells that have finished; that of a baseline, which several have, once."""
    found: dict[Any, dict[str, Any]] = {}
    for row in (row for cell in cells if cell.is_finished for row in cell.rows()):
        found.setdefault((row["cell"], row.get("seed")), row)
    return list(found.values())
