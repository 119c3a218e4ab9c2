"""The `Backend` protocol of schedulers, the `Job` that a backend returns, and the `StageRequest` that it receives.

`slurm/submit.py` lists the backends by name. A new one is a class like `slurm.local.LocalBackend`; configurations refer
to it by import path or by its name there.
"""

from __future__ import annotations

import pkgutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from pydantic import TypeAdapter

from slurm import trust
from slurm.access import trusted_groups
from specrl.artifacts import RESULT_FILE, digest, read_file, write_json
from specrl.config import ClusterConfig, Config, Resources, StageName
from specrl.context import StageContext
from specrl.lifetime.segments import Reason, Segment
from specrl.lineage.record import run_id
from specrl.processes import importing

CONTEXT_FILE = "context.json"
FLOW_KEY = "flow-0"  # the job key of a flow that `specrl run --detach` submitted
STOP_FILE = "stop"  # in a run's folder: the file by which `specrl stop` asks stages to leave their job


def stop_asked(run_dir: Path) -> bool:
    """Whether `specrl stop` was called since the run was last started."""
    return (run_dir / STOP_FILE).exists()


def forget_stop(run_dir: Path) -> None:
    """Withdraw the request to stop, because the run is started again."""
    (run_dir / STOP_FILE).unlink(missing_ok=True)


class JobError(RuntimeError):
    """A job could not be submitted, failed, or ran out of time. The message is one line for people."""


class UnseenError(JobError):
    """The job apparently continues, but its scheduler or its files have not answered for long."""


class StoppedError(RuntimeError):
    """The run was stopped because `specrl stop` asked for it. The message is one line for people."""


class SilentSchedulerError(RuntimeError):
    """The scheduler did not answer; a retry may succeed."""


class FullQueueError(SilentSchedulerError):
    """The scheduler accepts no further job of this user while others are queued."""


@dataclass(frozen=True)
class State:
    """The state of a job, as reported by its scheduler."""

    phase: Literal["pending", "running", "ended"]
    detail: str  # in the scheduler's words, such as Slurm's `TIMEOUT`, or how the ranks ended
    failed: bool = False  # a job that ended without failing has left its result
    reason: Reason | None = None  # why the job ended, if the scheduler reports it
    is_leaving: bool = False  # whether only the last processes of the job have not ended
    in_time: bool = False  # whether the scheduler itself ends it at its limit, which may be raised or pause
    never: str = ""  # why a pending job can never start


@dataclass(frozen=True)
class Failure:
    """The rank in which a job failed first (0 if unknown), and how it ended."""

    rank: int
    exception: str = ""  # the rank's exception, in one line; empty if unknown
    detail: str = ""  # the scheduler's words about a rank that ended without an exception
    killed: bool = False
    """Whether an external signal or a file system ended it, so that another job is worth trying."""
    follows: bool = False  # whether the exception only reports that another rank or a file system is unreachable


@dataclass(frozen=True)
class JobPlace:
    """What the scheduler says about a rank's job."""

    job_id: str
    end_at: float | None = None
    """The Unix time at which the scheduler will end the job; None if unlimited or unknown."""
    is_ending: bool = False


@dataclass(frozen=True)
class JobKey:
    """Identifies the one job of a stage of a run, whether or not it exists."""

    config: Config
    key: str  # the stage's content key, which begins with its name

    @property
    def stage(self) -> StageName:
        return cast(StageName, self.key.partition("-")[0])

    @property
    def cluster(self) -> ClusterConfig:
        return self.config.cluster_of(self.stage)

    @property
    def job_name(self) -> str:
        """The job's name for its scheduler: the key and the run's digits, because two runs may share keys.

        A folder without a run's record, such as a benchmark's, is identified by its path.
        """
        return f"{self.key}-{run_id(self.config.run_dir) or digest(str(self.config.run_dir.resolve()))[:6]}"

    @property
    def folder(self) -> Path:
        """The folder of the job's files: its context and its logs."""
        return self.config.run_dir / "jobs" / self.key

    @property
    def record_path(self) -> Path:
        """The file that names the stage's current or last job."""
        return self.config.run_dir / "jobs" / f"{self.key}.json"

    @property
    def context_path(self) -> Path:
        """The file from which the job's ranks read their `StageContext`."""
        return self.folder / CONTEXT_FILE


@dataclass(frozen=True)
class Record:
    """Names a stage's current or last job."""

    backend: str
    job_id: str
    started: int | None
    """When a local job's controller started, in clock ticks since boot; None for other backends."""
    host: str

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """The record, or None if no job has been submitted for the stage."""
        try:
            return _RECORD.validate_json(read_file(path))
        except FileNotFoundError:
            return None


_RECORD = TypeAdapter(Record)


@dataclass(frozen=True)
class StageRequest:
    """A stage to run as a job."""

    context: StageContext
    entry: str  # the function that every rank calls with the context, as `module:function`
    code: Path | None = None  # the copy of the sources that the job imports; None in a rank

    @property
    def key(self) -> JobKey:
        return JobKey(self.context.config, self.context.key)

    @property
    def resources(self) -> Resources:
        return self.context.config.resources_of(self.context.stage)

    @property
    def result_path(self) -> Path:
        """The file that exists once the stage has finished."""
        return self.context.stage_dir / RESULT_FILE

    def call(self) -> None:
        """Call the stage's function with the context, in a rank of the job."""
        with importing():
            stage = pkgutil.resolve_name(self.entry)
        stage(self.context)

    @property
    def checked_python(self) -> list[str]:
        """The Python options that check the copy of the sources before the options that follow them."""
        assert self.code is not None
        program = f"exec({Path(trust.__file__).read_text()!r})"  # in one line, because it becomes a word of a script
        groups = ",".join(map(str, trusted_groups(self.key.cluster))) or "-"
        return ["-I", "-c", program, str(self.code), self.code.name, groups]

    @property
    def arguments(self) -> list[str]:
        """The arguments of `python` that start one rank of the job."""
        return [*self.checked_python, "-m", "slurm.entry", str(self.key.context_path), self.entry]


class Job(Protocol):
    """A job of a backend, submitted or found again. Methods raise SilentSchedulerError if the scheduler is silent."""

    backend: str
    job_id: str
    attached: bool  # whether the job was found, rather than submitted by this flow
    ask_seconds: float  # seconds between two requests for the state

    def state(self) -> State:
        """Ask the scheduler for the job's state."""

    def cancel(self) -> None:
        """End the job, or at least ask the scheduler to. An error says how to end it by hand."""

    def log(self, rank: int) -> Path:
        """The file to which a rank prints; it may not exist yet."""

    def failure(self, ranks: int) -> Failure:
        """Which of the job's `ranks` failed first, and how, as far as known."""


class Backend(Protocol):
    """A scheduler. The flow calls the methods from `problems` to `submit`; the ranks of a job call the others.

    They raise JobError, with the reason in one line, if the scheduler cannot be used from here or refuses a job, and
    SilentSchedulerError if it does not answer.
    """

    name: str  # the value of `cluster.backend` that selects it

    def problems(self, config: Config) -> list[str]:
        """One line for each reason why a run cannot use this scheduler from here."""

    def options(self, config: Config, stage: StageName) -> str:
        """How a stage's job would be submitted, for `specrl run --dry-run`; may be empty."""

    def find(self, key: JobKey) -> Job | None:
        """The stage's job if it is pending or running, whoever submitted it, or None.

        A submitted job must be found at every instant, or it would be submitted twice.
        """

    def submit(self, request: StageRequest, environment: dict[str, str]) -> Job | None:
        """Submit a job that runs `python` with `request.arguments` in every rank, in the folder `request.key.folder`.

        Every process of the job needs the variables of `environment` before Python starts. After a missing answer, the
        job is looked for before it is submitted again. None means that the stage has finished meanwhile.
        """

    def rank_environment(self, request: StageRequest) -> dict[str, str]:
        """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and the network interfaces of this rank.

        A rank calls this before anything else.
        """

    def place(self, request: StageRequest) -> JobPlace:
        """What the scheduler says about this job, within seconds. The first two ranks call this."""

    def requeue(self, request: StageRequest) -> None:
        """Have the scheduler restart this job after its imminent end.

        If this is impossible and the job simply ends, the waiting flow submits another one.
        """

    def why_ended(self, segment: Segment) -> Reason:
        """Why an earlier job of the stage ended, if the job could not record it."""
