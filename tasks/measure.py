"""Measure a cell of a benchmark in a job of its own."""

from __future__ import annotations

import json
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from slurm.backend import JobError, JobKey, Record, SilentSchedulerError, StoppedError
from slurm.bench import ENTRY
from specrl.artifacts import RESULT_FILE
from tasks.cells import Cell, Outcome
from tasks.run import Finished, Reporter, work


@task(name="measure", task_run_name="{cell.label}", cache_policy=NO_CACHE)
def measure(cell: Cell, code: Path, reporter: Reporter) -> Outcome:
    """Return what became of the cell. A failure is one of the outcomes, so that the other cells go on."""
    cached = cell.is_finished
    if not cached:
        cell.write_job()
        try:
            work(cell.context, ENTRY, code, reporter, cell.label)
        except (JobError, StoppedError, SilentSchedulerError) as error:
            reporter.note(f"{cell.label}: {error}")
            return Outcome(cell, cached, str(error))
    seconds = float(json.loads((cell.folder / RESULT_FILE).read_text())["seconds"])
    record = Record.read(JobKey(cell.context.config, cell.context.key).record_path)
    job_id = record.job_id if record is not None else None
    reporter.finished(cell.label, Finished("bench", cell.context.key, cell.folder, seconds, job_id, cached))
    return Outcome(cell, cached, seconds=seconds, job_id=job_id)
