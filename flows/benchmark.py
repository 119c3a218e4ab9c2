"""Benchmarks as jobs: the cells of a command or of a sweep, side by side, each measured once.

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
from tasks.cells import Cell, Outcome
from tasks.measure import measure
from tasks.run import cancel_jobs, end_jobs


def cancel(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the jobs of the cells when the flow is cancelled in Prefect; a SIGTERM to the flow leaves them running.

    Prefect passes the arguments by these names.
    """
    cancel_jobs(Path(flow_run.parameters["folder"]))


@flow(name="specrl-bench", flow_run_name="{folder}", on_cancellation=[cancel], validate_parameters=False)
def benchmark(folder: str, cells: list[Cell], code: Path, on_outcome: Callable[[Outcome], None]) -> list[Outcome]:
    """Measure cells, and return what became of each, in their order.

    Args:
        folder: The folder of the cells.
        code: The copy of the sources that the jobs import.
        on_outcome: Called in this thread as soon as a cell has finished or failed.
    """
    reporter = PlainReporter(Console(highlight=False, soft_wrap=True))
    outcomes: dict[str, Outcome] = {}
    try:
        futures = [measure.submit(cell, code, reporter) for cell in cells]
        for future in as_completed(futures):
            outcome = future.result()
            outcomes[outcome.cell.context.key] = outcome
            on_outcome(outcome)
    except KeyboardInterrupt:
        end_jobs(Path(folder), reporter.note)
        raise
    return [outcomes[cell.context.key] for cell in cells]


def run_flow(
    folder: Path, cells: list[Cell], code: Path, at_once: int, on_outcome: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run the flow in this process; see `benchmark`.

    Args:
        at_once: The largest number of jobs that wait or run at the same time.
    """
    runner: Any = ThreadPoolTaskRunner(max_workers=at_once)  # Prefect's types take none with parameters
    return benchmark.with_options(task_runner=runner)(str(folder), cells, code, on_outcome)
