"""Jobs on Slurm, and the commands by which the flow submits, finds and watches them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import psutil
import submitit

from slurm.backend import Failure, FullQueueError, JobError, JobKey, JobPlace, SilentSchedulerError, StageRequest, State
from slurm.commands import (
    COMMAND_SECONDS,
    PRESENT_SECONDS,
    WORDLESS,
    as_flags,
    ask,
    batch_script,
    describe,
    forget,
    listed,
    sbatch_options,
)
from slurm.environment import LOOPBACK, inherited, log_path
from slurm.failures import LOG_BYTES, first_error, lacked_memory
from slurm.supervisor import ATTEMPT, KILLING
from specrl.artifacts import write_text
from specrl.config import ClusterConfig, Config, StageName
from specrl.config.sbatch import MEMORY_OPTIONS
from specrl.events import record_event
from specrl.lifetime.segments import Reason, Segment, read_segments
from specrl.processes import end_of, port_of

logger = logging.getLogger(__name__)

ASK_SECONDS = ClusterConfig().ask_seconds
COMMANDS = ("sbatch", "srun", "squeue", "scancel")
PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
PENDING |= {"POWER_UP_NODE"}
RUNNING = {"RUNNING", "COMPLETING", "EXPEDITING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"}
GOES_ON = {"RUNNING", "SIGNALING"}
"""The states in squeue of a job that is not ending yet. A job is SIGNALING until Slurm knows that a signal, such as a
preemption warning, has arrived, and a rank may ask before that."""
UNKNOWN = "no longer in the queue"
SUCCEEDED = {"COMPLETED", UNKNOWN}
FAILED = {"BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
FAILED |= {"RECONFIG_FAIL", "REVOKED", "TIMEOUT"}
"""The states of ended jobs. Unlisted states, perhaps of a later Slurm, are inconclusive."""
NEVER = {
    "DependencyNeverSatisfied": "a job that it depends on has not ended as asked",
    r"(?:Assoc|QOS)Max\w+Per(?:Job|Node)(?:Limit)?": "it asks for more than a job of its account or QOS may have",
    r"QOSMin\w+": "it asks for less than a job of its QOS must have",
    "PartitionTimeLimit": "resources.minutes is more than its partition allows",
}
"""The reasons why a job waits for ever. Others may pass, for instance when somebody releases the job."""
REASONS: dict[str, Reason] = {
    "TIMEOUT": "walltime",
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node lost",
    "BOOT_FAIL": "node lost",
    "REQUEUED": "requeued",
    "DEADLINE": "failed",
    "OUT_OF_MEMORY": "out of memory",
}
SUBMIT_SECONDS = 120  # for sbatch, which itself retries while Slurm is busy
TRANSIENT = (
    "Socket timed out",
    "Unable to contact slurm controller",
    "Connection refused",
    "Connection reset",
    "Connection timed out",
    "Resource temporarily unavailable",
    "Zero Bytes were transmitted or received",
    "Transport endpoint is not connected",
    "Message receive failure",
    "Message send failure",
    "Unexpected message received",
    "Protocol authentication error",
    "Invalid authentication credential",
    "Munge encode failed",
    "Communication connection failure",
    "Unable to connect to database",
    "Slurm backup controller in standby mode",
    "Slurm temporarily unable to accept job",
    "I/O error writing script/environment to file",
    f"took more than {SUBMIT_SECONDS} s",
    WORDLESS,
)
"""Messages of sbatch when Slurm did not answer: the job may still have been queued."""
FULL = "SubmitJob"  # in all of Slurm's reasons about the number of queued jobs, as QOSMaxSubmitJobPerUserLimit
MEMORY = ("mem", *sorted(MEMORY_OPTIONS))
CHOSEN = ("account", "partition", "qos")  # of these, a refusal says so too if they are not given
NAMED = {"account": "account", "partition": "partition", "qos": "qos", "time": r"\btime"}
NAMED |= dict.fromkeys(MEMORY, r"\bmem(ory)?\b|node config")
NAMED |= dict.fromkeys(("ntasks-per-node", "cpus-per-task"), r"processor|\bcpus?\b|node config")
NAMED |= {"nodes": r"node (config|count)|\bnodes\b", "gpus-per-node": r"\bgres\b|\bgpus?\b|node config"}
NAMED |= {"constraint": "feature|node config", "reservation": "reservation"}
NAMED |= {"licenses": "license", "nodelist": "node name", "tmp": "temporary disk"}
"""The options that are repeated where sbatch speaks of them, and the words by which it does."""
OVER = ("Invalid job id", "already completing or completed")  # the message of scancel for a job that has ended
SRUN_ERROR = re.compile(r"^srun: error: \S+: tasks? (\d+)\S*: (.+)$", re.MULTILINE)
KILLED = {signal.strsignal(number) for number in KILLING}  # the message of srun for a rank ended by a signal
SUBMITTED = (re.compile(r"Submitted batch job (\d+)"), re.compile(r"^\s*(\d+)(?:;\S+)?\s*$", re.MULTILINE))
"""The output of sbatch, without and with --parsable, which a site's wrapper may add along with other lines."""
STARTS_AT = re.compile(r" to start at (\d+) ")
NODE_FAILURE = re.compile(r"^srun: error: Node failure on (\S+)$", re.MULTILINE)
NO_SUCH_NODES = ("node configuration", "Invalid node name")
"""The messages of sbatch for a partition with too few suitable nodes, and for a node that no longer exists."""
NODE_SECONDS = 24 * 3600  # for which a failed node is excluded
RANK_COMMAND_SECONDS = 5  # for a rank's command, since its job may be about to end
ONE_HOST = "SPECRL_ONE_HOST"  # set by the development cluster, whose nodes are this machine and have no addresses


class SlurmJob:
    backend = "slurm"

    def __init__(self, job_id: str, folder: Path, attached: bool, ask_seconds: float = ASK_SECONDS) -> None:
        self.job_id, self.folder, self.attached, self.ask_seconds = job_id, folder, attached, ask_seconds
        self._answered_at = float("-inf")

    def state(self) -> State:
        # The list of jobs may be as old as the last answer to this call, or `ask_seconds`.
        jobs = listed(min(self.ask_seconds, time.monotonic() - self._answered_at))
        self._answered_at = time.monotonic()
        found = next((job for job in jobs if job.job_id == self.job_id), None)
        word, reason = (found.word, found.reason) if found is not None else self._asked_alone()
        if word in PENDING:
            return State("pending", f"{word}, {reason}", never=self._why_never(reason))
        if word in RUNNING:
            leaving = word == "COMPLETING"
            return State("running", word, is_leaving=leaving, in_time=not leaving)
        if word not in SUCCEEDED | FAILED:
            raise SilentSchedulerError(f"{word} is no state of a job that specrl knows")
        if word == "FAILED" and lacked_memory(self.log(0)):
            return State("ended", word, failed=True, reason="out of memory")
        return State("ended", word, failed=word not in SUCCEEDED, reason=REASONS.get(word))

    def cancel(self) -> None:
        try:
            ask("scancel", self.job_id)
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
        found = SRUN_ERROR.search(end_of(self.log(0), LOG_BYTES))
        if found is None:
            return Failure(0)
        return Failure(int(found[1]), detail=f"rank {found[1]}: {found[2]}", killed=found[2] in KILLED)

    def _why_never(self, reason: str) -> str:
        if reason == "PartitionTimeLimit" and "," in ask("squeue", "-h", "-j", self.job_id, "-o", "%P"):
            return ""  # the reason of one partition; another may accept the job
        return next((words for pattern, words in NEVER.items() if re.fullmatch(pattern, reason)), "")

    def _asked_alone(self) -> tuple[str, str]:
        """Query a job that was submitted after the list was made, is somebody else's, or ended long ago."""
        try:
            answer = ask("squeue", "-h", "-t", "all", "-j", self.job_id, "-o", "%T %r").strip()
        except SilentSchedulerError as error:
            if "Invalid job id" not in str(error):
                raise
            answer = ""
        word, _, reason = answer.partition(" ")
        # Without accounting, the job is simply no longer in the queue.
        return word or next(reversed(_accounted(self.job_id)), UNKNOWN), reason


class SlurmBackend:
    """A Slurm cluster, used through the commands of a login node."""

    name = "slurm"

    def problems(self, config: Config) -> list[str]:
        missing = [command for command in COMMANDS if shutil.which(command) is None]
        if missing:
            return [f"--cluster slurm: {', '.join(missing)} not found; run on a login node, or with --cluster local"]
        return []

    def options(self, config: Config, stage: StageName) -> str:
        return describe(config, stage) + _expected_start(config, stage)

    def find(self, key: JobKey) -> SlurmJob | None:
        # Slurm lists a job from its acceptance until the last rank has gone.
        jobs = [job for job in listed(PRESENT_SECONDS) if job.name == key.job_name]
        ids = [job.job_id for job in jobs if job.word not in SUCCEEDED | FAILED]
        if not ids:
            return None
        return SlurmJob(ids[0], key.folder, attached=True, ask_seconds=key.cluster.ask_seconds)

    def submit(self, request: StageRequest, environment: dict[str, str]) -> SlurmJob:
        failed = failed_nodes(request.context.run_dir)
        if failed and not _fits(request, sorted(failed)):
            failed = {}
        job_id = _sbatch(request, environment, sorted(failed))
        for node, how in failed.items():
            text = f"{node} is left out of job {job_id}: {how} in the last 24 hours"
            record_event(request.context.stage_dir, "node", text)
        return SlurmJob(job_id, request.key.folder, attached=False, ask_seconds=request.key.cluster.ask_seconds)

    def rank_environment(self, request: StageRequest) -> dict[str, str]:
        job, ranks = submitit.JobEnvironment(), submitit.helpers.TorchDistributedEnvironment()
        attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
        own = {
            "MASTER_ADDR": ranks.master_addr,
            # Each attempt of this job uses another port, because the last one may have been taken.
            "MASTER_PORT": os.environ.get("MASTER_PORT") or str(port_of(f"{job.job_id}-{int(attempt)}")),
            "RANK": str(ranks.rank),
            "WORLD_SIZE": str(ranks.world_size),
            "LOCAL_RANK": str(ranks.local_rank),
            "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
            ATTEMPT: attempt,
        }
        if request.resources.nodes == 1 or ONE_HOST in os.environ:
            return own | LOOPBACK
        if request.key.cluster.interface is not None:
            return own | interface_variables(request.key.cluster.interface)
        guess = interface_variables(interface_towards(str(job.hostnames[1 if job.node == 0 else 0])))
        return own | {name: os.environ.get(name) or value for name, value in guess.items()}

    def place(self, request: StageRequest) -> JobPlace:
        job_id = os.environ["SLURM_JOB_ID"]
        try:
            answer = ask("squeue", "-h", "-j", job_id, "-o", "%T %e", seconds=RANK_COMMAND_SECONDS).split()
        except (JobError, SilentSchedulerError) as error:  # a container may lack Slurm's commands
            logger.warning("%s", error)
            known = os.environ.get("SLURM_JOB_END_TIME")
            return JobPlace(job_id, float(known) if known else None)
        if not answer or answer[0] not in GOES_ON:
            return JobPlace(job_id, is_ending=True)
        with contextlib.suppress(ValueError, IndexError):  # a job without a limit has no such time
            return JobPlace(job_id, float(answer[1]))
        return JobPlace(job_id)

    def requeue(self, request: StageRequest) -> None:
        try:
            ask("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
        except (JobError, SilentSchedulerError) as error:
            logger.warning("the job's script has to queue it again: %s", error)

    def why_ended(self, segment: Segment) -> Reason:
        # Accounting has a line for each attempt of the job, the current one last.
        words = _accounted(segment.job_id, "-D", seconds=RANK_COMMAND_SECONDS)
        ended = [word for word in words if word in SUCCEEDED | FAILED | {"REQUEUED"}]
        if ended:
            return REASONS.get(ended[-1], "killed")
        return "requeued" if segment.job_id == os.environ.get("SLURM_JOB_ID") else "killed"


def interface_variables(interface: str) -> dict[str, str]:
    """The variables that make gloo and NCCL use a network interface."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def interface_towards(host: str) -> str:
    """The network interface that routes to a host; a ValueError if none does."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: the kernel chooses the route and so the local address
            own = probe.getsockname()[0].partition("%")[0]
    except OSError as error:
        raise ValueError(f"no network interface leads to {host} ({error}); name one: cluster.interface") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return str(name)
    raise ValueError(f"no network interface has the address {own}, which leads to {host}; name one: cluster.interface")


def _expected_start(config: Config, stage: StageName) -> str:
    flags = as_flags(sbatch_options(config, stage))
    try:
        said = ask("sbatch", "--test-only", *flags, "--wrap=true", seconds=RANK_COMMAND_SECONDS)
    except (JobError, SilentSchedulerError) as error:
        return f"; {error}" if shutil.which("sbatch") else ""  # a dry run needs no Slurm
    at = STARTS_AT.search(said)
    return f"; expected start: {time.strftime('%Y-%m-%d %H:%M', time.localtime(int(at[1])))}" if at else ""


def _fits(request: StageRequest, without: list[str]) -> bool:
    """Whether enough nodes exist without these. A refused job would stay in Slurm's accounting."""
    options = sbatch_options(request.context.config, request.context.stage, without)
    try:
        ask("sbatch", "--test-only", *as_flags(options), "--wrap=true")
    except SilentSchedulerError as error:
        return not any(words in str(error) for words in NO_SUCH_NODES)
    return True


def _sbatch(request: StageRequest, environment: dict[str, str], without: list[str]) -> str:
    script = request.key.folder / "submission.sh"
    write_text(script, batch_script(request, environment, without))
    forget()
    try:
        said = ask("sbatch", str(script), seconds=SUBMIT_SECONDS, environment=inherited())
    except SilentSchedulerError as error:
        reason = str(error).removeprefix("sbatch: ")
        if FULL in reason:
            raise FullQueueError(reason) from error
        if any(words in reason for words in TRANSIENT):
            raise SilentSchedulerError(reason) from error
        options = sbatch_options(request.context.config, request.context.stage)
        named = [key for key, words in NAMED.items() if re.search(words, reason, re.IGNORECASE)]
        given = {key: f"={options[key]}" if key in options else " not given" for key in named}
        words = "".join(f"; --{key}{value}" for key, value in given.items() if key in options or key in CHOSEN)
        raise JobError(f"Slurm refuses the job: {reason}{words}") from error
    finally:
        forget()  # a list that was made meanwhile may lack the job
    if (found := SUBMITTED[0].search(said) or SUBMITTED[1].search(said)) is None:
        raise SilentSchedulerError(f"sbatch does not say which job it has submitted: {said.strip()}")
    return found[1]


def failed_nodes(run_dir: Path) -> dict[str, str]:
    """The nodes that failed during a job of the run within `NODE_SECONDS`, and how."""
    found: dict[str, str] = {}
    for stage_dir in sorted((run_dir / "stages").glob("*")):
        for segment in read_segments(stage_dir):
            if segment.ended is None or time.time() - segment.ended > NODE_SECONDS:
                continue
            if segment.failed_node:
                found[segment.failed_node] = "a rank on it hung"
            if segment.reason == "node lost":
                log = log_path(run_dir / "jobs" / stage_dir.name, segment.job_id, 0)
                text = log.read_text(errors="replace") if log.exists() else ""
                # Without a message of srun, the job has lost the node of srun itself.
                found |= dict.fromkeys(NODE_FAILURE.findall(text) or filter(None, [segment.host]), "it was lost")
    return found


def _accounted(job_id: str, *options: str, seconds: float = COMMAND_SECONDS) -> list[str]:
    try:
        lines = ask("sacct", "-nPX", *options, "-j", job_id, "-o", "State", seconds=seconds).splitlines()
    except SilentSchedulerError:
        return []
    return [line.split()[0] for line in lines if line.strip()]  # "CANCELLED by 1000" is one answer
