"""Attach or submit: one job per stage, whatever happened to whoever submitted it.

A stage is finished when its `result.json` exists. Else its job is looked for - on Slurm by name in the queue, on this
machine by the lock its controller holds - and only if there is none a new one is submitted. Both exist from the moment
the job does, so there is no instant at which killing the flow leads to a second job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slurm import cluster, local, resources
from slurm.entry import MAX_TIMEOUTS, StageJob, command
from slurm.jobs import Job, SilentSchedulerError
from slurm.records import Record, jobs_dir, read_record, record_path, write_record
from specrl.artifacts import RESULT_FILE, digest
from specrl.config import Config
from specrl.context import StageContext

T = TypeVar("T")

SILENCE_SECONDS = 600
"""How long Slurm's controller may be silent (restarted, overloaded) before the flow gives up."""
RETRY_SECONDS = 5


@dataclass(frozen=True)
class Site:
    """Where the jobs of one stage of a run are looked for."""

    config: Config
    key: str

    @property
    def backend(self) -> str:
        return self.config.cluster.backend

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir

    @property
    def job_name(self) -> str:
        """The key, and which run folder it is: two runs of one configuration have the same keys."""
        return f"{self.key}-{digest(str(self.run_dir.resolve()))[:6]}"

    @property
    def folder(self) -> Path:
        return jobs_dir(self.run_dir, self.key)

    @property
    def record_path(self) -> Path:
        return record_path(self.run_dir, self.key)


def attach_or_submit(context: StageContext, entry: str, code: Path) -> Job | None:
    """The one job of a stage: the one that lives, else a new one; none when the stage turns out to be finished.

    Args:
        entry: `module:function`, called in every rank with the context.
        code: snapshot the job imports from.

    Raises:
        JobError: it cannot be submitted, with the reason in one line.
    """
    site = Site(context.config, context.key)
    if (job := find(site)) is not None:
        return job
    if (context.stage_dir / RESULT_FILE).exists():  # it ended while it was looked for
        return None
    context.stage_dir.mkdir(parents=True, exist_ok=True)
    site.folder.mkdir(parents=True, exist_ok=True)
    context_path = site.folder / "context.json"
    context.save(context_path)
    wanted = context.config.resources_of(context.stage)
    words = command(site.folder, context_path, entry, wanted.minutes)
    environment = resources.job_environment(code)
    callable_ = StageJob(context_path, entry)
    if site.backend == "local":
        return local.submit(
            words,
            callable_,
            site.folder,
            site.record_path,
            context.stage_dir / RESULT_FILE,
            parameters=resources.local_parameters(wanted),
            environment=environment,
            setup=context.config.cluster.setup,
            max_timeouts=MAX_TIMEOUTS,
        )
    parameters = resources.slurm_parameters(site.job_name, wanted, context.config.cluster, environment)
    job = cluster.submit(words, callable_, site.folder, parameters=parameters, max_timeouts=MAX_TIMEOUTS)
    write_record(site.record_path, Record("slurm", job.job_id, None, "", time.time()))
    return job


def find(site: Site) -> Job | None:
    """The living job of a stage, if there is one; waits for a scheduler that does not answer.

    Raises:
        JobError: the scheduler is not there.
    """
    if site.backend == "local":
        return local.find(site.record_path, site.folder)
    job = patiently(lambda: cluster.find(site.job_name, site.folder))
    if job is not None and ((record := read_record(site.record_path)) is None or record.job_id != job.job_id):
        write_record(site.record_path, Record("slurm", job.job_id, None, "", time.time()))
    return job


def patiently(ask: Callable[[], T]) -> T:
    """Ask until Slurm answers, for `SILENCE_SECONDS`."""
    deadline = time.monotonic() + SILENCE_SECONDS
    while True:
        try:
            return ask()
        except SilentSchedulerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


def live_jobs(config: Config) -> dict[str, Job]:
    """Key -> job, for every stage of the run, of this configuration or an earlier one, whose job lives."""
    keys = sorted({path.name for path in (config.run_dir / "jobs").glob("*") if path.is_dir()})
    found = {key: find(Site(config, key)) for key in keys}
    return {key: job for key, job in found.items() if job is not None}
