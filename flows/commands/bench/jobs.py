"""Benchmarks as jobs: what `specrl bench ... --cluster` and `specrl bench sweep` submit, and what they make of it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.folder import only_flow, write_config
from flows.server import PrefectServer, mark_crashed_flows
from slurm.access import restrict
from slurm.backend import JobError
from slurm.environment import snapshot_code
from slurm.registry import backend_of
from specrl.artifacts import write_json, write_text
from specrl.bench.job import BenchJob
from specrl.bench.run.settings import SweepSettings
from specrl.bench.settings import BenchSettings
from specrl.config import Config, ConfigError
from specrl.tracking import CellRecord, benchmark_config, log_cell, log_speedups
from tasks.cells import CELLS, JSON_FILE, PAGE_FILE, Cell, Measured, Outcome, make_cell
from tasks.run import forget_stop


@dataclass(frozen=True)
class BenchRequest:
    """A benchmark that is to run as jobs."""

    name: str
    settings: BenchSettings
    command: str
    """The command line that pages show."""
    page: Path
    json_path: Path
    threads: int | None
    """The number of CPU threads of its process, if the user chose one."""
    overrides: Sequence[str]
    """`KEY=VALUE` each, of the cluster and the resources."""
    at_once: int
    """The largest number of jobs that wait or run at the same time."""
    changes: tuple[str, ...] = ()
    """`KEY=VALUE` each, of the settings of the run that is measured."""

    def job(self, name: str, settings: BenchSettings) -> BenchJob:
        """Return the work of a cell, whose place is still to be set."""
        entry, values = f"specrl.bench.{name}.main:main", settings.model_dump(mode="json")
        paths = Path(), values, self.command, self.page, self.json_path
        return BenchJob(entry, *paths, threads=self.threads, changes=self.changes)

    def cells(self, measured: Measured) -> list[Cell]:
        """Return the cells of a sweep, or the one of another benchmark.

        Raises:
            ConfigError: An override is wrong.
        """
        if not isinstance(self.settings, SweepSettings):
            job = self.job(self.name, self.settings)
            return [make_cell(measured, self.settings, job, self.overrides, self.name, {})]
        return [
            make_cell(
                measured, point.settings, self.job("run", point.settings), self.overrides, point.label, point.parameters
            )
            for point in self.settings.points()
        ]


def submit(request: BenchRequest, run_dir: Path | None, config: Config) -> None:
    """Measure every cell in a job of its own, record each in MLflow, and write the page and the rows.

    Args:
        run_dir: The folder of the finished run; None for a benchmark without one.
        config: The configuration of the run, with the chosen backend; without a run, that of the jobs alone.

    Raises:
        ConfigError: The jobs cannot be submitted from here.
        JobError: Some cells failed. The others are on the page.
    """
    folder = (run_dir or config.run_dir) / "bench" / CELLS
    measured = Measured(folder, config, run_dir)
    cells = request.cells(measured)
    outcomes = measure_all(cells, measured, request)
    measured_cells = [outcome for outcome in outcomes if outcome.error is None]
    done = [outcome.cell for outcome in measured_cells]
    failed = {outcome.cell.label: outcome.error for outcome in outcomes if outcome.error is not None}
    if isinstance(request.settings, SweepSettings):
        write_sweep(request, measured_cells, failed)
    elif done:
        copy_results(done[0].folder, request.page, request.json_path)
    if done and request.name == "run" and not request.changes:
        log_speedups(config, done[0].settings.headline(rows_of(done[0]), config))
    if failed:
        reasons = "; ".join(f"{label}: {error}" for label, error in failed.items())
        raise JobError(f"{len(failed)} of {len(cells)} jobs of bench {request.name} failed: {reasons}")


def measure_all(cells: list[Cell], measured: Measured, request: BenchRequest) -> list[Outcome]:
    """Run the flow over the cells, and record each in MLflow as soon as it has finished or failed.

    Raises:
        ConfigError: The scheduler cannot be used from here, or another process measures cells of this run.
    """
    config = cells[0].context.config
    backend = backend_of(config.cluster_of("bench"))
    restrict(config.cluster)
    backend.connect()
    if problems := backend.problems(config):
        raise ConfigError("\n".join(problems))
    tracked = benchmark_config(measured.config)
    with only_flow(measured.folder, config.cluster), PrefectServer(measured.config.runs_dir) as server:
        forget_stop(measured.folder)
        write_config(config)
        code = snapshot_code(measured.folder)
        server.wait()
        from flows.benchmark import run_flow  # imports Prefect, which reads its environment once, at import

        mark_crashed_flows(measured.folder)
        return run_flow(
            measured.folder, cells, code, request.at_once, lambda outcome: record(outcome, tracked, request)
        )


def record(outcome: Outcome, tracked: Config, request: BenchRequest) -> None:
    """Record a cell that has finished or failed in MLflow.

    Args:
        tracked: The configuration of the experiment of benchmarks.
    """
    cell = outcome.cell
    rows = rows_of(cell) if outcome.error is None else []
    files = sorted(path for path in cell.folder.glob("*") if path.suffix in (".md", ".svg", ".arrow"))
    of_cell = {"benchmark": cell.job.name, "run": tracked.name}
    settings = {name: value for name, value in cell.job.settings.items() if value is not None}
    changes = dict(change.split("=", 1) for change in cell.job.changes)
    log_cell(
        tracked,
        cell.folder,
        CellRecord(
            name=cell.label,
            tags={"specrl.key": cell.context.key, "specrl.run": tracked.name, "mlflow.source.name": request.command},
            params={**of_cell, **settings, **changes, **cell.parameters},
            rows=rows,
            metrics=cell.settings.summary(rows, tracked),
            files={"": [*files, cell.folder / JSON_FILE] if outcome.error is None else []},
            error=outcome.error,
        ),
    )


def rows_of(cell: Cell) -> list[dict[str, Any]]:
    """Return the rows of a finished cell."""
    from specrl.bench.sweep.rows import ROWS_FILE, read_arrow  # imports Arrow, as the page and the flow do

    return read_arrow(cell.folder / ROWS_FILE)


def write_sweep(request: BenchRequest, done: Sequence[Outcome], failed: dict[str, str]) -> None:
    """Write the page of a sweep and its rows, as JSON and beside that as Arrow."""
    from specrl.bench.sweep.page import SweptCell, without_plain, write_sweep_page
    from specrl.bench.sweep.rows import write_arrow

    found = [(outcome.cell, row) for outcome in done for row in without_plain(rows_of(outcome.cell))]
    rows = [{**cell.parameters, **row, "key": cell.context.key} for cell, row in found]
    dimensions = list(dict.fromkeys(name for outcome in done for name in outcome.cell.parameters))
    cells = [
        SweptCell(outcome.cell.label, outcome.cell.context.key, outcome.job_id, outcome.seconds, outcome.cached)
        for outcome in done
    ]
    write_json(request.json_path, rows)
    write_arrow(request.json_path.with_suffix(".arrow"), rows)
    write_sweep_page(request.page, request.command, dimensions, rows, cells, failed)
    print(f"page: {request.page}")


def clear(folder: Path) -> None:
    """Remove what a benchmark without a run has left in its folder, but not what its jobs measure or have measured."""
    kept = folder / "bench" / CELLS
    for path in [*folder.glob("*"), *kept.parent.glob("*")]:
        if path.is_dir() and path not in (kept, kept.parent):
            shutil.rmtree(path, ignore_errors=True)
        elif not path.is_dir():
            path.unlink(missing_ok=True)


def copy_results(folder: Path, page: Path, json_path: Path) -> None:
    """Copy page, charts and rows of a cell to where the user wants them. The charts are called after the page."""
    own = Path(PAGE_FILE).stem
    write_text(page, (folder / PAGE_FILE).read_text().replace(f"]({own}-", f"]({page.stem}-"))
    for chart in folder.glob(f"{own}-*.svg"):
        write_text(page.with_name(f"{page.stem}-{chart.name.removeprefix(f'{own}-')}"), chart.read_text())
    write_text(json_path, (folder / JSON_FILE).read_text())
    print(f"page: {page}")
