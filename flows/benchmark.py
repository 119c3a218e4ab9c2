"""Benchmarks as jobs: the cells of a command side by side, each measured once and recorded in MLflow.

What has finished is kept, whatever becomes of the flow: when the same command is called again, finished cells are
skipped and jobs that still run are found. A cell that fails leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.futures import as_completed
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console

from flows.display import PlainReporter
from tasks.cells import CellJob
from tasks.measure import measure
from tasks.run import cancel_jobs, end_jobs

Recorder = Callable[[CellJob, str | None], None]


def cancel(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the jobs of the cells when the flow is cancelled in Prefect; a SIGTERM to the flow leaves them running.

    Prefect passes the arguments by these names.
    """
    cancel_jobs(Path(flow_run.parameters["folder"]))


@flow(name="specrl-bench", flow_run_name="{folder}", on_cancellation=[cancel], validate_parameters=False)
def benchmark(folder: str, cells: list[CellJob], code: Path, record: Recorder) -> list[str | None]:
    """Measure cells, and return the error of each in their order, None where there is none.

    Args:
        folder: The folder of the cells.
        code: The copy of the sources that the jobs import.
        record: Called in this thread with each cell and its error, as soon as it has finished or failed.
    """
    reporter = PlainReporter(Console(highlight=False, soft_wrap=True))
    try:
        futures = {measure.submit(cell, code, reporter): cell for cell in cells}
        for future in as_completed(list(futures)):
            record(futures[future], future.result())
    except KeyboardInterrupt:
        end_jobs(Path(folder), reporter.note)
        raise
    return [future.result() for future in futures]


def run_flow(folder: Path, cells: list[CellJob], code: Path, at_once: int, record: Recorder) -> list[str | None]:
    """Run the flow in this process; see `benchmark`.

    Args:
        at_once: The largest number of jobs that wait or run at the same time.
    """
    runner: Any = ThreadPoolTaskRunner(max_workers=at_once)  # Prefect's types take none with parameters
    return benchmark.with_options(task_runner=runner)(str(folder), cells, code, record)
