"""What every rank of a job runs: `python -m slurm.entry JOBS_FOLDER CONTEXT.json MODULE:FUNCTION MINUTES`.

The job is complete in itself: whoever submitted it may die the moment after, before submitit has put its pickle in
place. A job that is queued again (time limit, preemption, lost node) runs this anew; stages resume from their files.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slurm import environment
from specrl.context import StageContext

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

MAX_TIMEOUTS = 3
"""How often a job that ran into its time limit is queued again."""


class StageJob:
    """The pickled callable. Its `checkpoint` lets submitit queue the job again when its time limit comes near."""

    def __init__(self, context_path: Path, entry: str) -> None:
        self.context_path = context_path
        self.entry = entry

    def __call__(self) -> None:
        module, _, function = self.entry.partition(":")
        getattr(importlib.import_module(module), function)(StageContext.load(self.context_path))

    def checkpoint(self) -> DelayedSubmission:
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(self)


def command(jobs_dir: Path, context_path: Path, entry: str, minutes: int) -> list[str]:
    """Words after `python` that start a rank."""
    return ["-u", "-m", "slurm.entry", str(jobs_dir), str(context_path), entry, str(minutes)]


def main(arguments: list[str]) -> None:
    jobs_dir, context_path, entry, minutes = Path(arguments[0]), Path(arguments[1]), arguments[2], int(arguments[3])
    context = StageContext.load(context_path)
    _die_with_controller()
    environment.prepare(context.config.resources_of(context.stage), context.config.cluster)
    from submitit.core.submission import process_job

    _put_pickle(jobs_dir, context_path, entry, minutes)
    process_job(jobs_dir)
    _leave_at_once()


def _die_with_controller() -> None:
    """A local rank goes when its controller goes, however that ends: only the controller's lock says that it runs."""
    if os.environ.get("SUBMITIT_EXECUTOR") != "local":
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(os.environ["SUBMITIT_LOCAL_JOB_ID"]):
        raise SystemExit("the controller of this job is gone")


def _leave_at_once() -> None:
    """End without taking the interpreter apart: with an engine in it that takes seconds, and everything is written."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _put_pickle(jobs_dir: Path, context_path: Path, entry: str, minutes: int) -> None:
    """Write what submitit's submission would have, if the flow died between submitting and writing it."""
    from submitit import JobEnvironment
    from submitit.core.utils import DelayedSubmission, JobPaths

    # `slurm.entry` is `__main__` here: name the class by its module, as the submitting process does.
    job_class = importlib.import_module("slurm.entry").StageJob
    target = JobPaths(jobs_dir, job_id=JobEnvironment().job_id).submitted_pickle
    if target.exists():
        return
    submission = DelayedSubmission(job_class(context_path, entry))
    submission.set_timeout(minutes, MAX_TIMEOUTS)
    temporary = target.with_name(f".{target.name}.{os.environ['RANK']}")
    submission.dump(temporary)
    temporary.replace(target)


if __name__ == "__main__":
    main(sys.argv[1:])
