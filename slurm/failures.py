"""What went wrong in a job, in one line."""

from __future__ import annotations

import pickle
from pathlib import Path

from slurm.jobs import Job, State
from specrl.stages.context import StageContext

MAX_CHARACTERS = 600


def explain(job: Job, context: StageContext, state: State) -> str:
    """`STAGE failed (BACKEND job ID, STATE): ERROR; log: PATH`, one line.

    The error is the earliest that a rank raised, since those of the others are most often its consequences; without one
    (killed, out of memory, out of time) it is the limit that was hit, or the last line of the log.
    """
    ranks = context.config.resources_of(context.stage).ranks
    errors = [(path.stat().st_mtime, rank, path) for rank in range(ranks) if (path := _pickle(job, rank)).exists()]
    for _, rank, path in sorted(errors):
        outcome, trace = pickle.loads(path.read_bytes())
        if outcome == "error":
            return _line(job, context, state, f"{last_error(trace)} (rank {rank})", _log(job, rank))
    log = max((_log(job, rank) for rank in range(ranks)), key=lambda path: path.stat().st_mtime if path.exists() else 0)
    error = _hint(context, state) or f"no Python error; the log ends: {_last_line(log)}"
    return _line(job, context, state, error, log)


def last_error(trace: str) -> str:
    """The exception of a traceback, without the frames: what follows the last indented line."""
    lines = trace.rstrip().splitlines()
    begin = max((number + 1 for number, line in enumerate(lines) if line.startswith((" ", "\t"))), default=0)
    return " ".join(line.strip() for line in (lines[begin:] or lines[-1:]))[:MAX_CHARACTERS]


def _line(job: Job, context: StageContext, state: State, error: str, log: Path) -> str:
    where = log if log.exists() else job.folder
    return f"{context.stage} failed ({job.backend} job {job.job_id}, {state.detail}): {error}; log: {_short(where)}"


def _hint(context: StageContext, state: State) -> str:
    resources = context.config.resources_of(context.stage)
    if state.detail == "TIMEOUT":
        return f"it ran longer than resources.minutes = {resources.minutes}"
    if state.detail == "OUT_OF_MEMORY" or "SIGKILL" in state.detail:
        return f"killed, most likely out of memory: resources.memory_gib_per_rank = {resources.memory_gib_per_rank:g}"
    if state.detail == "CANCELLED":
        return "it was cancelled"
    return ""


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _pickle(job: Job, rank: int) -> Path:
    return job.folder / f"{job.job_id}_{rank}_result.pkl"


def _log(job: Job, rank: int) -> Path:
    return job.folder / f"{job.job_id}_{rank}_log.out"


def _last_line(log: Path) -> str:
    if not log.exists():
        return "(there is no log)"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:MAX_CHARACTERS] if lines else "(it is empty)"
