"""Find a stage's job or submit one, so that a stage has one job whatever happens to the submitting flows.

A stage is finished if its `result.json` exists. Otherwise its job is looked for (on Slurm by its name in the queue, on
this machine by its controller's lock), and a new one is submitted only if there is none. Name and lock exist as soon as
the job does, so at no instant can killing the flow lead to a second job.
"""

from __future__ import annotations

import functools
import logging
import time
from pathlib import Path

from slurm.backend import (
    Backend,
    FullQueueError,
    Job,
    JobError,
    JobKey,
    Record,
    SilentSchedulerError,
    StageRequest,
    StoppedError,
    stop_asked,
)
from slurm.environment import job_environment
from slurm.failures import clear_errors
from slurm.local import LocalBackend
from slurm.slurm_backend import SlurmBackend
from specrl.artifacts import is_passing, read_object
from specrl.config import STAGES, ClusterConfig, Config, ConfigError, understood_config
from specrl.config.base import import_function
from specrl.context import StageContext

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 600  # for a silent scheduler (restarting or overloaded) before the flow gives up
UNCERTAIN_SECONDS, FULL_SECONDS = 30, 60
"""The pauses after an unanswered submission, until Slurm is sure to list its job, and after one that found the queue
full."""
RETRY_SECONDS = 5  # before a silent scheduler is asked again
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (LocalBackend(), SlurmBackend())}
"""The backends by name, listed only here."""


def attach_or_submit(context: StageContext, entry: str, code: Path, **variables: str) -> Job | None:
    """The one job of a stage: the pending or running one, or else a new one; None if the stage has finished.

    `StageRequest` describes the arguments; `variables` are environment variables for this job only.
    """
    request = StageRequest(context, entry, code)
    begun = answered = time.monotonic()
    while True:
        try:
            if (job := find(request.key)) is not None:
                return _named(request.key, job)
            if request.result_path.exists():  # the job ended while it was looked for
                return None
            context.stage_dir.mkdir(parents=True, exist_ok=True)
            request.key.folder.mkdir(parents=True, exist_ok=True)
            clear_errors(request.key.folder)  # a job whose ranks never start would be explained by them
            context.save(request.key.context_path)
            environment = {**job_environment(code, context.config), **variables}
            return _named(request.key, backend_of(request.key.cluster).submit(request, environment))
        except FullQueueError as error:
            answered = time.monotonic()
            _wait_after(error, request, answered - begun)
        except (SilentSchedulerError, OSError) as error:
            if isinstance(error, OSError) and not is_passing(error):
                raise
            # The job may have been queued nevertheless: look for it first.
            _wait_after(error, request, time.monotonic() - answered)


def _named(key: JobKey, job: Job | None) -> Job | None:
    """Record the job in the run's folder; a local job's controller has already done so."""
    record = Record.read(key.record_path)
    if job is not None and (record is None or record.job_id != job.job_id):
        Record(job.backend, job.job_id, None, "").write(key.record_path)
    return job


def _wait_after(error: Exception, request: StageRequest, seconds: float) -> None:
    """Wait before a job that could not be submitted, because of such errors for `seconds`, is looked for again."""
    is_full = isinstance(error, FullQueueError)
    limit = 60 * request.key.cluster.queue_minutes if is_full else SILENCE_SECONDS
    if seconds > limit:
        raise JobError(f"{request.key.stage} could not be submitted for {limit / 60:g} minutes: {error}") from error
    logger.warning("%s is not submitted yet (%s); another attempt follows", request.key.stage, error)
    until = time.monotonic() + (FULL_SECONDS if is_full else UNCERTAIN_SECONDS)
    while time.monotonic() < until and not stop_asked(request.context.run_dir):
        time.sleep(0.5)
    if stop_asked(request.context.run_dir):
        raise StoppedError(f"{request.key.stage} was stopped before it was submitted")


def find(key: JobKey) -> Job | None:
    """`find_now`, retried until the scheduler answers; a SilentSchedulerError after `SILENCE_SECONDS`."""
    deadline = time.monotonic() + SILENCE_SECONDS
    while True:
        try:
            return find_now(key)
        except SilentSchedulerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


def find_now(key: JobKey) -> Job | None:
    """The stage's job if it is pending or running, or None; see `Backend.find`."""
    found = (backend.find(key) for backend in _backends(key))
    return next((job for job in found if job is not None), None)


def _backends(key: JobKey) -> list[Backend]:
    backends = [backend_of(key.cluster)]
    config = read_object(key.context_path).get("config")  # it is written before a job is submitted
    if isinstance(config, dict):
        name = understood_config(config, key.config.run_dir).cluster_of(key.stage).backend
        if name != key.cluster.backend:
            backends.insert(0, backend_of(key.cluster.model_copy(update={"backend": name})))
    return backends


def live_jobs(config: Config) -> dict[str, Job]:
    """The pending and running jobs of a run by key, including those of its earlier configurations."""
    keys = sorted(path.name for path in (config.run_dir / "jobs").glob("*") if path.is_dir())
    found = {key: find(JobKey(config, key)) for key in keys}
    return {key: job for key, job in found.items() if job is not None}


def backend_of(cluster: ClusterConfig) -> Backend:
    """The backend named by `cluster.backend`: one of `BACKENDS`, or a class as `package.module:Class`."""
    return BACKENDS.get(cluster.backend) or _imported(cluster.backend)


def backends_of(config: Config) -> list[Backend]:
    """The distinct backends of a run's stages."""
    backends = [backend_of(config.cluster_of(stage)) for stage in STAGES]
    return list({backend.name: backend for backend in backends}.values())


@functools.cache
def _imported(path: str) -> Backend:
    if ":" not in path:
        raise ConfigError(f"cluster.backend = {path!r}: allowed: {', '.join(BACKENDS)}, or package.module:Class")
    made = import_function("cluster.backend", path)
    try:
        backend: Backend = made()
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the class is a user's
        raise ConfigError(f'cluster.backend = "{path}" cannot be made: {error}') from error
    return backend
