"""Find a stage's job or submit one, so that a stage has one job, whatever happens to the flows that submit it.

A stage is finished when its `result.json` exists. Otherwise its job is looked for (on Slurm by its name in the queue,
on this machine by the lock that its controller holds), and a new one is submitted only if there is none. The name and
the lock exist from the moment the job does, so there is no instant at which killing the flow leads to a second job.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slurm.backend import Backend, Job, JobKey, SilentSchedulerError, StageRequest
from slurm.environment import job_environment
from slurm.registry import backend_of
from specrl.artifacts import read_json
from specrl.config import Config, understood_config
from specrl.context import StageContext

T = TypeVar("T")

SILENCE_SECONDS = 600
"""How long a scheduler (that restarts or is overloaded) may be silent before the flow gives up."""
RETRY_SECONDS = 5
"""The pause before a scheduler that did not answer is asked again."""


def attach_or_submit(context: StageContext, entry: str, code: Path) -> Job | None:
    """Return the one job of a stage: the one that is pending or running, or else a new one.

    Args:
        entry: The function that every rank calls with the context, as `module:function`.
        code: The snapshot of the sources that the job imports.

    Returns:
        The job, or None when the stage turned out to be finished.

    Raises:
        ConfigError: `cluster.backend` is unknown.
        JobError: The job cannot be submitted; the reason is one line.
    """
    request = StageRequest(context, entry, code)
    if (job := find(request.key)) is not None:
        return job
    if request.result_path.exists():  # the job ended while it was looked for
        return None
    context.stage_dir.mkdir(parents=True, exist_ok=True)
    request.key.folder.mkdir(parents=True, exist_ok=True)
    context.save(request.key.context_path)
    return backend_of(request.key.cluster).submit(request, job_environment(code, context.config))


def find(key: JobKey) -> Job | None:
    """Return the stage's job if it is pending or running, or None. Wait for a scheduler that does not answer.

    Raises:
        JobError: The scheduler cannot be used from here.
        SilentSchedulerError: The scheduler has not answered for `SILENCE_SECONDS`.
    """
    for backend in _backends(key):
        if (job := _patiently(functools.partial(backend.find, key))) is not None:
            return job
    return None


def find_now(key: JobKey) -> Job | None:
    """Return the stage's job if it is pending or running, or None.

    Raises:
        JobError: The scheduler cannot be used from here.
        SilentSchedulerError: The scheduler does not answer at the moment.
    """
    found = (backend.find(key) for backend in _backends(key))
    return next((job for job in found if job is not None), None)


def _backends(key: JobKey) -> list[Backend]:
    """Return the backend with the stage's last job, where that is another one, and the configuration's."""
    backends = [backend_of(key.cluster)]
    context = read_json(key.context_path)  # it is written before a job is submitted
    config = context.get("config") if isinstance(context, dict) else None
    if isinstance(config, dict):
        name = understood_config(config, key.config.run_dir).cluster_of(key.stage).backend
        if name != key.cluster.backend:
            backends.insert(0, backend_of(key.cluster.model_copy(update={"backend": name})))
    return backends


def live_jobs(config: Config) -> dict[str, Job]:
    """Return the pending and running jobs of a run by key, those of earlier configurations of the run included."""
    keys = sorted(path.name for path in (config.run_dir / "jobs").glob("*") if path.is_dir())
    found = {key: find(JobKey(config, key)) for key in keys}
    return {key: job for key, job in found.items() if job is not None}


def _patiently(ask: Callable[[], T]) -> T:
    """Return the scheduler's answer, and ask again while it is silent, for up to `SILENCE_SECONDS`."""
    deadline = time.monotonic() + SILENCE_SECONDS
    while True:
        try:
            return ask()
        except SilentSchedulerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)
