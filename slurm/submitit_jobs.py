"""Code of the backends that use submitit: the pickled function, its call in a rank, and the search for its errors."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from submitit import JobEnvironment
from submitit.core.submission import process_job
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.helpers import TorchDistributedEnvironment

from slurm.backend import Failure, StageRequest
from slurm.failures import last_error
from slurm.walltime import MAX_TIMEOUTS, warning_seconds
from specrl.config import Resources
from specrl.context import StageContext


class StageFunction:
    """The function that submitit pickles. Its `checkpoint` lets submitit queue the job again at its time limit."""

    def __init__(self, request: StageRequest) -> None:
        # The pickle names the context's file and does not hold the context: other code could not unpickle its objects.
        self.context_path, self.entry = request.key.context_path, request.entry

    def __call__(self) -> None:
        StageRequest(StageContext.load(self.context_path), self.entry).call()

    def checkpoint(self) -> DelayedSubmission:
        return DelayedSubmission(self)


def common_parameters(resources: Resources) -> dict[str, Any]:
    """Return the parameters that submitit's executors for this machine and for Slurm share."""
    return {"signal_delay_s": warning_seconds(resources), "stderr_to_stdout": True}


def rank_environment() -> dict[str, str]:
    """Return the variables from which torch.distributed learns its rank, as submitit knows them."""
    ranks = TorchDistributedEnvironment()
    values = {
        "MASTER_ADDR": ranks.master_addr,
        "MASTER_PORT": ranks.master_port,
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.world_size,
        "LOCAL_RANK": ranks.local_rank,
        "LOCAL_WORLD_SIZE": ranks.local_world_size,
    }
    return {name: str(value) for name, value in values.items()}


def other_host() -> str:
    """Return the name of the job's first node or, on that node, of its second one."""
    job = JobEnvironment()
    return str(job.hostnames[1 if job.node == 0 else 0])


def run_rank(request: StageRequest) -> None:
    """Call the stage's function through submitit, which pickles errors, and end the process."""
    _write_missing_pickle(request)
    process_job(request.key.folder)
    # Everything is written; tearing down an interpreter with an engine in it would take seconds.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _write_missing_pickle(request: StageRequest) -> None:
    """Write the pickle of the submission, if the flow died after submitting the job and before writing the pickle."""
    target = JobPaths(request.key.folder, job_id=JobEnvironment().job_id).submitted_pickle
    if target.exists():
        return
    submission = DelayedSubmission(StageFunction(request))
    submission.set_timeout(request.resources.minutes, MAX_TIMEOUTS)
    temporary = target.with_name(f".{target.name}.{os.environ['RANK']}")
    submission.dump(temporary)
    temporary.replace(target)


def log_path(folder: Path, job_id: str, rank: int) -> Path:
    """Return the file to which a rank of a submitit job prints."""
    return folder / f"{job_id}_{rank}_log.out"


def first_exception(folder: Path, job_id: str, ranks: int) -> Failure | None:
    """Return the earliest exception that a rank raised, from which later ones mostly follow, or None."""
    paths = [folder / f"{job_id}_{rank}_result.pkl" for rank in range(ranks)]
    ended = sorted((path.stat().st_mtime, rank, path) for rank, path in enumerate(paths) if path.exists())
    for _, rank, path in ended:
        outcome, trace = pickle.loads(path.read_bytes())
        if outcome == "error":
            return Failure(rank, exception=last_error(trace))
    return None
