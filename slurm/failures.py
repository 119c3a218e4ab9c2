"""Explain in one line why a job failed."""

from __future__ import annotations

from pathlib import Path

from slurm.backend import Job, State
from specrl.context import StageContext

MAX_CHARACTERS = 600
"""The most characters of an error that its line repeats; the log has all of them."""
LOG_TAIL_BYTES = 4096
"""How many bytes are read from the end of a log to find its last line."""


def explain(job: Job, context: StageContext, state: State) -> str:
    """Return one line of the form `STAGE failed (BACKEND job ID, STATE): ERROR; log: PATH`.

    The error is the exception of the rank that failed first. If that rank raised none (because it was killed, or ran
    out of memory or time), it is the limit that was reached, or else the last line of that rank's log.
    """
    failure = job.failure(context.config.resources_of(context.stage).ranks)
    log = job.log(failure.rank)
    if failure.exception:
        error = f"{failure.exception} (rank {failure.rank})"
    else:
        reached = _limit(context, state)
        error = reached or f"no Python error; the log of rank {failure.rank} ends: {_last_line(log)}"
        error = f"{failure.detail}; {error}" if failure.detail else error
    place = _relative(log if log.exists() else log.parent)
    return f"{context.stage} failed ({job.backend} job {job.job_id}, {state.detail}): {error}; log: {place}"


def last_error(trace: str) -> str:
    """Return the exception of a traceback, which follows its last indented line, in one line."""
    lines = trace.rstrip().splitlines()
    begin = max((number + 1 for number, line in enumerate(lines) if line.startswith((" ", "\t"))), default=0)
    return " ".join(line.strip() for line in (lines[begin:] or lines[-1:]))[:MAX_CHARACTERS]


def _limit(context: StageContext, state: State) -> str:
    """Return which limit of the configuration ended the job, or an empty text when none is known to have."""
    resources = context.config.resources_of(context.stage)
    if state.cause == "time limit":
        return f"it ran longer than resources.minutes = {resources.minutes}"
    if state.cause == "memory":
        return f"killed, most likely out of memory: resources.memory_gib_per_rank = {resources.memory_gib_per_rank:g}"
    if state.cause == "cancelled":
        return "it was cancelled"
    return ""


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _last_line(log: Path) -> str:
    if not log.exists():
        return "(there is no log)"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:MAX_CHARACTERS] if lines else "(it is empty)"
