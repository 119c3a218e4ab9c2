"""Jobs on Slurm, and the commands by which the flow submits, finds and watches them."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import submitit
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import _make_sbatch_string

from slurm.backend import (
    Cause,
    Failure,
    FullQueueError,
    JobError,
    JobKey,
    JobPlace,
    Record,
    SilentSchedulerError,
    StageRequest,
    State,
)
from slurm.environment import (
    LOOPBACK,
    inherited,
    interface_towards,
    interface_variables,
    log_path,
    other_host,
    rank_environment,
)
from slurm.failures import first_error
from slurm.ranks.supervisor import ATTEMPT
from slurm.sbatch import describe, parameters, python_command
from specrl.config import ClusterConfig, Config, StageName
from specrl.lifetime.segments import Reason, Segment
from specrl.processes import OF_CLUSTER, slurm_environment

logger = logging.getLogger(__name__)

COMMANDS = ("sbatch", "srun", "squeue", "scancel")
PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
PENDING |= {"POWER_UP_NODE"}
RUNNING = {"RUNNING", "COMPLETING", "EXPEDITING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"}
GOES_ON = {"RUNNING", "SIGNALING"}
"""The states that squeue gives for a job that is not ending yet. A job is SIGNALING until Slurm knows that a signal,
such as the warning of a preemption, has arrived, and a rank may ask before that."""
UNKNOWN = "no longer in the queue"
SUCCEEDED = {"COMPLETED", UNKNOWN}
FAILED = {"BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
FAILED |= {"RECONFIG_FAIL", "REVOKED", "TIMEOUT"}
"""The words for jobs that have ended. One that stands nowhere here, as a later Slurm may have, says nothing."""
CAUSES: dict[str, Cause] = {
    "TIMEOUT": "time limit",
    "OUT_OF_MEMORY": "memory",
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node lost",
    "BOOT_FAIL": "node lost",
}
REASONS: dict[str, Reason] = {
    "TIMEOUT": "walltime",
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node lost",
    "BOOT_FAIL": "node lost",
    "REQUEUED": "requeued",
    "DEADLINE": "failed",
    "OUT_OF_MEMORY": "failed",
}
TRANSIENT = (
    "Socket timed out",
    "Unable to contact slurm controller",
    "Connection refused",
    "Connection reset",
    "Connection timed out",
    "Resource temporarily unavailable",
    "Zero Bytes were transmitted or received",
    "Transport endpoint is not connected",
    "Slurm backup controller in standby mode",
    "Slurm temporarily unable to accept job",
)
"""The words of sbatch when Slurm did not answer: the job may have been queued all the same."""
FULL = "SubmitJob"
"""What all reasons of Slurm have in them that are about the number of queued jobs, as QOSMaxSubmitJobPerUserLimit."""
OVER = ("Invalid job id", "already completing or completed")
"""The words of scancel about a job that has ended."""
SRUN_ERROR = re.compile(r"^srun: error: \S+: tasks? (\d+)\S*: (.+)$", re.MULTILINE)
KILLED = {signal.strsignal(number) for number in (signal.SIGKILL, signal.SIGABRT, signal.SIGTERM, signal.SIGUSR2)}
"""The words of srun for a rank that a signal ended. NCCL aborts a process whose peers are gone, and a rank hears the
two last signals only once it has been set up."""
COMMAND_SECONDS = 30
"""How long one of Slurm's commands may take before Slurm counts as silent."""
RANK_COMMAND_SECONDS = 5
"""The same for a rank, whose job may be about to end."""
LOGS = "/folder-of-the-logs"
"""What stands for that folder until the script is written."""
ONE_HOST = "SPECRL_ONE_HOST"
"""A variable that the development cluster sets: its nodes are all this machine, and their names do not resolve."""


class SlurmJob:
    """A job of Slurm, known by its id."""

    backend = "slurm"
    ask_seconds = 5.0

    def __init__(self, job_id: str, folder: Path, attached: bool) -> None:
        self.job_id, self.folder, self.attached = job_id, folder, attached

    def state(self) -> State:
        """Ask squeue for the state, which it knows until shortly after the job's end, and sacct after that.

        Raises:
            SilentSchedulerError: Slurm does not answer at the moment.
        """
        try:
            answer = _ask("squeue", "-h", "-t", "all", "-j", self.job_id, "-o", "%T %r").strip()
        except SilentSchedulerError as error:
            if "Invalid job id" not in str(error):
                raise
            answer = ""
        word, _, reason = answer.partition(" ") if answer else (self._accounting_state(), "", "")
        if word in PENDING:
            return State("pending", f"{word}, {reason}")
        if word in RUNNING:
            return State("running", word, suspended=word == "SUSPENDED")
        if word not in SUCCEEDED | FAILED:
            raise SilentSchedulerError(f"{word} is no state of a job that specrl knows")
        return State("ended", word, failed=word not in SUCCEEDED, cause=CAUSES.get(word))

    def cancel(self) -> None:
        try:
            _ask("scancel", self.job_id)
        except SilentSchedulerError as error:
            if not any(words in str(error) for words in OVER):
                raise SilentSchedulerError(
                    f"slurm job {self.job_id} could not be cancelled: {error}; run scancel {self.job_id}"
                ) from error

    def log(self, rank: int) -> Path:
        return log_path(self.folder, self.job_id, rank)

    def failure(self, ranks: int) -> Failure:
        return first_error(self.folder, ranks) or self._srun_error()

    def _srun_error(self) -> Failure:
        log = self.log(0)
        found = SRUN_ERROR.search(log.read_text(errors="replace")) if log.exists() else None
        if found is None:
            return Failure(0)
        return Failure(int(found[1]), detail=f"rank {found[1]}: {found[2]}", killed=found[2] in KILLED)

    def _accounting_state(self) -> str:
        try:
            lines = _ask("sacct", "-nPX", "-j", self.job_id, "-o", "State").splitlines()
        except SilentSchedulerError:
            lines = []
        # "CANCELLED by 1000" is one answer. Without accounting, the job is simply no longer in the queue.
        return lines[-1].split()[0] if lines and lines[-1] else UNKNOWN


class SlurmBackend:
    """The backend for a Slurm cluster, used through the commands of a login node."""

    name = "slurm"

    def problems(self, config: Config) -> list[str]:
        missing = [command for command in COMMANDS if shutil.which(command) is None]
        if missing:
            return [f"--cluster slurm: {', '.join(missing)} not found; run on a login node, or with --cluster local"]
        return []

    def queue(self, cluster: ClusterConfig) -> str:
        return cluster.partition or "default"

    def options(self, config: Config, stage: StageName) -> str:
        return describe(config, stage)

    def find(self, key: JobKey) -> SlurmJob | None:
        """Return the job with this name in Slurm's queue, or None.

        A job is in the queue from the moment Slurm accepts it, even if the flow died before it recorded the job's id.

        Raises:
            SilentSchedulerError: Slurm does not answer at the moment.
        """
        ids = _ask("squeue", "-h", "--me", "-n", key.job_name, "-o", "%i").split()
        if not ids:
            return None
        record = Record.read(key.record_path)
        if record is None or record.job_id != ids[0]:
            try:
                _write_record(key, ids[0])
            except OSError as error:  # who only looks may not be able to write
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
        return SlurmJob(ids[0], key.folder, attached=True)

    def submit(self, request: StageRequest, environment: dict[str, str]) -> SlurmJob:
        """Submit a job with sbatch.

        Raises:
            FullQueueError: The user has as many jobs in the queue as may be there.
            JobError: Slurm refuses the job; the message has Slurm's reason.
            SilentSchedulerError: Slurm did not answer. It may have queued the job.
        """
        executor = _StageExecutor(request)
        executor.update_parameters(**parameters(request, environment))
        try:
            with _outside_jobs(), contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it raises
                job = executor.start()
        except FailedJobError as error:
            reason = _reason(str(error))
            if FULL in reason:
                raise FullQueueError(reason) from error
            if any(words in reason for words in TRANSIENT):
                raise SilentSchedulerError(reason) from error
            raise JobError(f"Slurm refuses the job: {reason}") from error
        _write_record(request.key, job.job_id)
        return SlurmJob(job.job_id, request.key.folder, attached=False)

    def rank_environment(self, request: StageRequest) -> dict[str, str]:
        one_host = request.resources.nodes == 1 or ONE_HOST in os.environ
        attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        ranks = rank_environment(attempt) | {ATTEMPT: str(attempt)}
        if one_host:
            return ranks | LOOPBACK
        if request.key.cluster.interface is not None:
            return ranks | interface_variables(request.key.cluster.interface)
        guess = interface_variables(interface_towards(other_host()))
        return ranks | {name: os.environ.get(name) or value for name, value in guess.items()}

    def run_rank(self, request: StageRequest) -> None:
        request.call()

    def place(self, request: StageRequest) -> JobPlace:
        job_id = os.environ["SLURM_JOB_ID"]
        try:
            answer = _ask("squeue", "-h", "-j", job_id, "-o", "%T %e", seconds=RANK_COMMAND_SECONDS).split()
        except (JobError, SilentSchedulerError) as error:  # a container may lack Slurm's commands
            logger.warning("%s", error)
            known = os.environ.get("SLURM_JOB_END_TIME")
            return JobPlace(job_id, float(known) if known else None)
        if not answer or answer[0] not in GOES_ON:
            return JobPlace(job_id, is_ending=True)
        with contextlib.suppress(ValueError):  # a job without a limit has no such time
            return JobPlace(job_id, float(answer[1]))
        return JobPlace(job_id)

    def requeue(self, request: StageRequest) -> None:
        try:
            _ask("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
        except (JobError, SilentSchedulerError) as error:
            logger.warning("the job's script has to queue it again: %s", error)

    def why_ended(self, segment: Segment) -> Reason:
        """Return what accounting says: it has a line for each time that the job ran, and the present one comes last."""
        try:
            lines = _ask(
                "sacct", "-nPXD", "-j", segment.job_id, "-o", "State", seconds=RANK_COMMAND_SECONDS
            ).splitlines()
        except SilentSchedulerError:
            lines = []
        ended = [word for line in lines if (word := line.partition(" ")[0]) in SUCCEEDED | FAILED | {"REQUEUED"}]
        if ended:
            return REASONS.get(ended[-1], "killed")
        return "requeued" if segment.job_id == os.environ.get("SLURM_JOB_ID") else "killed"


class _StageExecutor(submitit.SlurmExecutor):
    def __init__(self, request: StageRequest) -> None:
        super().__init__(request.key.folder)
        self.request = request

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        # In the names of logs % begins one of Slurm's patterns, and %% stands for one; submitit reads %t there as well.
        text, folder = _make_sbatch_string(command, LOGS, **self.parameters), str(self.folder).replace("%", "%%")
        for name in ("%j_0_log.out", "%j_%t_log.out"):
            text = text.replace(f"{LOGS}/{name}", shlex.quote(f"{folder}/{name}"))
        return text

    def start(self) -> submitit.Job[None]:
        """Submit the job, without the pickle that submitit would write for it."""
        return self._submit_command(self._submitit_command_str)

    @property
    def _submitit_command_str(self) -> str:
        command = python_command(self.request.context.config, self.request.context.stage)
        return shlex.join([*command, *self.request.arguments])


@contextlib.contextmanager
def _outside_jobs() -> Iterator[None]:
    """Hide the variables of the job in which the flow itself may run, and those of Prefect, but stay on the cluster."""
    cluster = {name: os.environ[name] for name in OF_CLUSTER if name in os.environ}
    with submitit.helpers.clean_env(extra_names=sorted(set(os.environ) - set(inherited()))):
        os.environ.update(cluster)
        yield


def _write_record(key: JobKey, job_id: str) -> None:
    Record("slurm", job_id, None, "", time.time()).write(key.record_path)


def _reason(text: str) -> str:
    lines = [line for line in text.splitlines() if "error:" in line] or text.splitlines()[-1:]
    return "; ".join(line.removeprefix("sbatch: error: ").strip() for line in lines)


def _ask(*command: str, seconds: float = COMMAND_SECONDS) -> str:
    """Return the output of one of Slurm's commands, in an environment that changes nothing about it.

    Args:
        seconds: How long it may take.

    Raises:
        JobError: The command is not installed.
        SilentSchedulerError: It failed or took too long.
    """
    try:
        done = subprocess.run(
            command, env=slurm_environment(), capture_output=True, text=True, timeout=seconds, check=False
        )
    except FileNotFoundError as error:
        if command[0] == "sacct":
            raise SilentSchedulerError("no sacct") from error
        raise JobError(f"{command[0]} is not installed: --cluster slurm works where Slurm's commands are") from error
    except subprocess.TimeoutExpired as error:
        raise SilentSchedulerError(f"{command[0]} took more than {seconds:g} s") from error
    if done.returncode:
        said = done.stderr.strip().removeprefix(f"{command[0]}: error: ")
        raise SilentSchedulerError(f"{command[0]}: {said or done.returncode}")
    return done.stdout
