"""What went wrong in a job, in one line."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

from slurm.jobs import Job, State
from specrl.context import StageContext

MAX_CHARACTERS = 600
SRUN_ERROR = re.compile(r"^srun: error: \S+: tasks? (\d+)\S*: (.+)$", re.MULTILINE)


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
    rank, word = (state.rank, "") if state.rank is not None else _from_srun(_log(job, 0))
    error = _hint(context, state) or f"no Python error; the log of rank {rank} ends: {_last_line(_log(job, rank))}"
    return _line(job, context, state, f"{word} {error}".lstrip(), _log(job, rank))


def last_error(trace: str) -> str:
    """The exception of a traceback, without the frames: what follows the last indented line."""
    lines = trace.rstrip().splitlines()
    begin = max((number + 1 for number, line in enumerate(lines) if line.startswith((" ", "\t"))), default=0)
    return " ".join(line.strip() for line in (lines[begin:] or lines[-1:]))[:MAX_CHARACTERS]


def _line(job: Job, context: StageContext, state: State, error: str, log: Path) -> str:
    where = log if log.exists() else job.folder
    return f"{context.stage} failed ({job.backend} job {job.job_id}, {state.detail}): {error}; log: {_short(where)}"


def _from_srun(log: Path) -> tuple[int, str]:
    """What srun says at the end of the first rank's log: which rank ended badly, and how."""
    if not log.exists():
        return 0, ""
    found = SRUN_ERROR.search(log.read_text(errors="replace"))
    return (int(found[1]), f"rank {found[1]}: {found[2]};") if found else (0, "")


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
