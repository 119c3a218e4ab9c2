"""Measure a cell of a benchmark in a job of its own."""

from __future__ import annotations

import json
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from slurm.backend import JobError, SilentSchedulerError, StoppedError
from slurm.bench import ENTRY, JOB_FILE
from specrl.artifacts import RESULT_FILE
from tasks.cells import CellJob
from tasks.run import Finished, Reporter, work


@task(name="measure", task_run_name="{cell.label}", cache_policy=NO_CACHE)
def measure(cell: CellJob, code: Path, reporter: Reporter) -> str | None:
    """Measure a cell, and return why it failed, if it did. A failure is an outcome, so that the other cells go on."""
    cached = cell.is_finished
    if not cached:
        cell.job.save(cell.folder / JOB_FILE)
        try:
            work(cell.context, ENTRY, code, reporter, cell.label)
        except (JobError, StoppedError, SilentSchedulerError) as error:
            reporter.note(f"{cell.label}: {error}")
            return str(error)
    seconds = float(json.loads((cell.folder / RESULT_FILE).read_text())["seconds"])
    reporter.finished(cell.label, Finished("bench", cell.context.key, cell.folder, seconds, None, cached))
    return None
