"""Jobs on Slurm, and the few words the flow exchanges with its controller."""

from __future__ import annotations

import contextlib
import getpass
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import submitit
from submitit.core.utils import FailedJobError

from slurm.jobs import JobError, SilentSchedulerError, State

PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"}
COMMAND_SECONDS = 30


class SlurmStageJob:
    """A Slurm job by its id."""

    backend: Literal["slurm"] = "slurm"

    def __init__(self, job_id: str, folder: Path, attached: bool) -> None:
        self.job_id, self.folder, self.attached = job_id, folder, attached

    def state(self) -> State:
        """squeue knows what lives and what ended a moment ago, and is there on every cluster; sacct knows the rest."""
        try:
            answer = _ask("squeue", "-h", "-t", "all", "-j", self.job_id, "-o", "%T %r").strip()
        except SilentSchedulerError as error:
            if "Invalid job id" not in str(error):
                raise
            answer = ""
        word, _, reason = answer.partition(" ") if answer else (self._accounting_state(), "", "")
        if word in PENDING:
            return State("pending", f"{word}, {reason}")
        return State("running" if word in RUNNING else "ended", word)

    def cancel(self) -> None:
        with contextlib.suppress(SilentSchedulerError):
            _ask("scancel", self.job_id)

    def _accounting_state(self) -> str:
        try:
            lines = _ask("sacct", "-nPX", "-j", self.job_id, "-o", "State").splitlines()
        except SilentSchedulerError:
            lines = []
        # "CANCELLED by 1000"; and where there is no accounting, the job is simply no longer in the queue.
        return lines[-1].split()[0] if lines and lines[-1] else "no longer in the queue"


def find(name: str, folder: Path) -> SlurmStageJob | None:
    """The live job with this name, if there is one: it exists from the moment Slurm has taken it, whoever knows.

    Raises:
        SilentSchedulerError: the controller does not answer.
    """
    jobs = _ask("squeue", "-h", "-u", getpass.getuser(), "-n", name, "-o", "%i").split()
    return SlurmStageJob(jobs[0], folder, attached=True) if jobs else None


def submit(
    words: list[str], callable_: Any, folder: Path, *, parameters: dict[str, Any], max_timeouts: int
) -> SlurmStageJob:
    """Submit a job.

    Args:
        words: what each rank runs, after `python`.
        callable_: what submitit pickles for the ranks.

    Raises:
        JobError: Slurm refuses it, with Slurm's reason.
    """
    executor = _StageExecutor(folder, words, max_timeouts)
    executor.update_parameters(**parameters)
    try:
        with _outside_jobs(), contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it raises
            job = executor.submit(callable_)
    except FailedJobError as error:
        raise JobError(f"Slurm refuses the job: {_reason(str(error))}") from error
    return SlurmStageJob(job.job_id, folder, attached=False)


class _StageExecutor(submitit.SlurmExecutor):
    def __init__(self, folder: Path, words: list[str], max_timeouts: int) -> None:
        super().__init__(folder, max_num_timeout=max_timeouts)
        self.words = words

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join([sys.executable, *self.words])


@contextlib.contextmanager
def _outside_jobs() -> Iterator[None]:
    """Hide the variables of a job that the flow itself may run in; but it is the same cluster."""
    conf = os.environ.get("SLURM_CONF")
    with submitit.helpers.clean_env():
        if conf is not None:
            os.environ["SLURM_CONF"] = conf
        yield


def _reason(text: str) -> str:
    lines = [line for line in text.splitlines() if "error:" in line] or text.splitlines()[-1:]
    return "; ".join(line.removeprefix("sbatch: error: ").strip() for line in lines)


def _ask(*command: str) -> str:
    """Output of a Slurm command.

    Raises:
        JobError: the command is not installed.
        SilentSchedulerError: it failed or took too long.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except FileNotFoundError as error:
        if command[0] == "sacct":
            raise SilentSchedulerError("no sacct") from error
        raise JobError(f"{command[0]} is not installed: --cluster slurm works where Slurm's commands are") from error
    except subprocess.TimeoutExpired as error:
        raise SilentSchedulerError(f"{command[0]} took more than {COMMAND_SECONDS} s") from error
    if done.returncode:
        raise SilentSchedulerError(f"{command[0]}: {done.stderr.strip() or done.returncode}")
    return done.stdout
