"""The errors that ranks record, and the line that explains why a job failed."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from slurm.backend import Failure, Job, State
from specrl.artifacts import is_passing, write_json
from specrl.checks.file_systems import lack_of_room
from specrl.config.sbatch import MEMORY_OPTIONS
from specrl.context import StageContext
from specrl.lifetime.segments import Reason, read_segments
from specrl.processes import end_of, last_line

MAX_CHARACTERS = 600  # characters of an error that its line repeats; the log has all
ROOM_BYTES = 2**20  # bytes that a disk must accept so as not to count as full
OF_ENDS = (
    r"srun: (?:launch/slurm|error: \S+: tasks? \d|error: Timed out|Job step|Force)|slurmstepd\S*: error: \*\*\*"
    "|Try .srun --help"
)
"""What srun writes after the reason why a rank ended."""
OUT_OF_MEMORY = re.compile(r"^srun: error: \S+: tasks? \S+: Out Of Memory$|\boom[-_]kill event", re.MULTILINE)
"""What the log of a job says whose ranks the kernel has ended for want of memory: mostly, its state is just FAILED."""
QUEUED_AGAIN = "DUE TO JOB REQUEUE"  # the last words in the log of a job that Slurm restarted
LOG_BYTES = 2**20  # of the end of a job's log, where Slurm's words about its ranks stand
OF_RANK = re.compile(r"^\[rank\d+\]: ")  # torch begins the lines of a traceback with it where ranks have met
LOG_RANK = re.compile(r"_(\d+)_log\.out$")


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Record the error that a rank of the job with this folder raised."""
    trace = "".join(traceback.format_exception(error))
    passes, full = is_passing(error), _full(error, folder.parents[1])
    known = {"time": time.time(), "trace": trace, "passes": passes, "follows": passes or is_of_connection(error)}
    known |= {"full": full and f"; {full}"}
    write_json(_error_path(folder, rank), known)


def clear_errors(folder: Path, rank: int | str = "*") -> None:
    """Remove the errors that all ranks, or one of them, recorded in earlier jobs with this folder."""
    for path in folder.glob(f"error-{rank}.json"):
        path.unlink(missing_ok=True)


def is_of_connection(error: BaseException) -> bool:
    """Whether an error only says that another rank stopped answering, and so is a consequence of another failure."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in names or "gloo/transport" in str(error)  # torch is not imported here


def lacked_memory(log: Path) -> bool:
    """Whether the log of a first rank says that the kernel has ended a rank of this attempt for want of memory."""
    return OUT_OF_MEMORY.search(end_of(log, LOG_BYTES).rpartition(QUEUED_AGAIN)[2]) is not None


def has_cause(folder: Path, ranks: int) -> bool:
    """Whether a rank recorded an error caused by neither another rank nor a file system."""
    return any(not error["follows"] for _, error in _errors(folder, ranks))


def first_error(folder: Path, ranks: int) -> Failure | None:
    """The earliest error recorded by a rank, or None; lost connections are consequences of other errors."""
    found = min(_errors(folder, ranks), key=lambda item: (item[1]["follows"], item[1]["time"]), default=None)
    if found is None:
        return None
    rank, error = found
    return Failure(
        rank, exception=last_error(error["trace"]) + error["full"], killed=error["passes"], follows=error["follows"]
    )


def _errors(folder: Path, ranks: int) -> list[tuple[int, dict[str, Any]]]:
    paths = {rank: _error_path(folder, rank) for rank in range(ranks)}
    return [(rank, json.loads(path.read_text())) for rank, path in paths.items() if path.exists()]


def _error_path(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"


def telling_logs(folder: Path) -> list[Path]:
    """The logs of all jobs with this folder; of hundreds of ranks, only those of the first, last and failed ones."""
    logs = {path: int(found[1]) for path in folder.glob("*.out") if (found := LOG_RANK.search(path.name))}
    failed = {int(path.stem.partition("-")[2]) for path in folder.glob("error-*.json")}
    telling = {0, max(logs.values(), default=0), *failed}
    return sorted(path for path in folder.glob("*.out") if logs.get(path, 0) in telling)


def explain(job: Job, context: StageContext, state: State) -> str:
    """One line of the form `STAGE failed (BACKEND job ID, STATE): ERROR; log: PATH`.

    The error is why the stage was given up, or else the exception of the rank that failed first. If that rank raised
    none (because it was killed, or ran out of memory or time), it is the exceeded limit, a full disk, or else the last
    line of that rank's log.
    """
    failure = job.failure(context.config.resources_of(context.stage).ranks)
    log = job.log(failure.rank)
    segments = [segment for segment in read_segments(context.stage_dir) if segment.job_id == job.job_id]
    gave_up, reason = (segments[-1].gave_up, segments[-1].reason) if segments else (None, None)
    reached = _limit(context, state.reason if gave_up else state.reason or reason)
    if gave_up is not None:
        error = f"{gave_up}; {reached}" if reached else gave_up
    elif failure.exception and not (failure.follows and state.reason == "out of memory"):
        error = f"{failure.exception} (rank {failure.rank})"
    else:
        unknown = f"no Python error; the log of rank {failure.rank} ends: {last_line(log, OF_ENDS)}"
        if not log.exists():
            unknown = "it left no log: its node may not see runs_dir, or may not write there"
        error = reached or _full_disk(context.run_dir) or unknown
        error = f"{failure.detail}; {error}" if failure.detail else error
    place = log if log.exists() else log.parent
    place = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    return f"{context.stage} failed ({job.backend} job {job.job_id}, {state.detail}): {error}; log: {place}"


def last_error(trace: str) -> str:
    """The exception of a traceback in one line: it follows the last indented line."""
    lines = [OF_RANK.sub("", line) for line in trace.rstrip().splitlines()]
    begin = max((number + 1 for number, line in enumerate(lines) if line.startswith((" ", "\t"))), default=0)
    return " ".join(line.strip() for line in (lines[begin:] or lines[-1:]))[:MAX_CHARACTERS]


def _limit(context: StageContext, reason: Reason | None) -> str:
    resources = context.config.resources_of(context.stage)
    if reason == "walltime":
        return f"it ran longer than resources.minutes = {resources.minutes}"
    cluster = context.config.cluster_of(context.stage)
    if reason == "out of memory":
        own = [f"cluster.sbatch.{name} = {value}" for name, value in cluster.sbatch.items() if name in MEMORY_OPTIONS]
        given = next(iter(own), f"resources.memory_gib_per_rank = {resources.memory_gib_per_rank:g}") + "; raise it"
        if not cluster.request_memory:
            asked = "the job asks for none (cluster.request_memory = false)"
            given = f"{asked}; ask for more cores, or for whole nodes with cluster.sbatch"
        if cluster.backend == "local":
            given = "this machine has no more; lower engine.kv_cache_gib, policy.tokens_per_micro_batch or the ranks"
        return f"killed, most likely out of memory: {given}"
    words = {"cancelled": "it was cancelled", "preempted": "it was preempted", "node lost": "a node was lost"}
    return words.get(reason or "", "")


def _full_disk(run_dir: Path) -> str:
    """Report a full disk of the run's folder, by writing, because free space does not reveal a quota."""
    try:
        with tempfile.TemporaryFile(dir=run_dir) as file:
            file.write(bytes(ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(run_dir)
        return _full(error, run_dir)
    return ""


def _full(error: BaseException, run_dir: Path) -> str:
    """Why a file system has no room, and what to do; empty for any other error."""
    full = lack_of_room(error)
    remedy = "raise that limit" if isinstance(error, OSError) and error.errno == errno.EFBIG else "make room"
    return full and f"{full}: {remedy}, and go on with specrl resume {run_dir.name}"
