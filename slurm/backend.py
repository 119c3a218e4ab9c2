"""The `Backend` protocol of schedulers, the `Job` that a backend returns, and the `StageRequest` that it is given.

`slurm/submit.py` lists the backends by name. A new one is a class like `slurm.local.LocalBackend`, which a
configuration names by its import path or by the name that it has there.
"""

from __future__ import annotations

import logging
import pkgutil
import time
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

logger = logging.getLogger(__name__)

CONTEXT_FILE = "context.json"
FLOW_KEY = "flow-0"  # the key of the job that is a run's flow, where `specrl run --detach` has made it one
STOP_FILE = "stop"  # a file in a run's folder by which `specrl stop` asks its stages to leave their job


def stop_asked(run_dir: Path) -> bool:
    """Whether `specrl stop` has asked the run to stop since it was last started."""
    return (run_dir / STOP_FILE).exists()


class JobError(RuntimeError):
    """A job could not be submitted, failed, or ran out of time. The message is one line for people."""


class UnseenError(JobError):
    """The job goes on, as far as is known, but its scheduler or its files have not answered for long."""


class StoppedError(RuntimeError):
    """The run was stopped because `specrl stop` asked for it. The message is one line for people."""


class SilentSchedulerError(RuntimeError):
    """The scheduler did not answer. It may answer when it is asked again."""


class FullQueueError(SilentSchedulerError):
    """The scheduler takes no further job of this user as long as those in the queue are there."""


@dataclass(frozen=True)
class State:
    """The state of a job, as its scheduler reports it."""

    phase: Literal["pending", "running", "ended"]
    detail: str  # the scheduler's own words, such as Slurm's `TIMEOUT`, or how the ranks ended
    failed: bool = False  # a job that ended without failing has left its result
    reason: Reason | None = None  # why the job ended, where the scheduler reports it
    suspended: bool = False  # whether the scheduler has suspended the job, whose time limit then does not come nearer
    is_leaving: bool = False  # whether the job has ended but for the last of its processes
    in_time: bool = False  # whether the scheduler itself lets it run on; somebody may have given it more time
    never: str = ""  # why a pending job can never start, in a few words


@dataclass(frozen=True)
class Failure:
    """The rank in which a job failed first (0 if that is not known), and how it ended."""

    rank: int
    exception: str = ""  # the exception that the rank raised, in one line; empty if none is known
    detail: str = ""  # the scheduler's words about the end of a rank that raised nothing
    killed: bool = False
    """Whether an external signal, or a file system, ended it, so that another job is worth a try."""
    follows: bool = False  # whether the exception only says that another rank, or a file system, is away


@dataclass(frozen=True)
class JobPlace:
    """What a rank's scheduler says about the job that it belongs to."""

    job_id: str
    end_at: float | None = None
    """The Unix time at which the scheduler will end the job; None if it has no limit or the scheduler does not say."""
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
        """The job's name for its scheduler: the key and the run's own digits, as two runs may share keys.

        A folder without a run's record, such as a benchmark's, is known by its path.
        """
        return f"{self.key}-{run_id(self.config.run_dir) or digest(str(self.config.run_dir.resolve()))[:6]}"

    @property
    def folder(self) -> Path:
        """The folder of the job's files: its context and its logs."""
        return self.config.run_dir / "jobs" / self.key

    @property
    def record_path(self) -> Path:
        """The file that names the job that runs, or last ran, the stage."""
        return self.config.run_dir / "jobs" / f"{self.key}.json"

    @property
    def context_path(self) -> Path:
        """The file from which the job's ranks read their `StageContext`."""
        return self.folder / CONTEXT_FILE


@dataclass(frozen=True)
class Record:
    """Names the job that runs, or last ran, a stage."""

    backend: str
    job_id: str
    started: int | None
    """When a local job's controller started, in clock ticks since boot. None for jobs of other backends."""
    host: str

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """The record, or None when no job has been submitted for the stage."""
        try:
            return _RECORD.validate_json(read_file(path))
        except FileNotFoundError:
            return None


_RECORD = TypeAdapter(Record)


@dataclass(frozen=True)
class StageRequest:
    """A stage that is to run as a job."""

    context: StageContext
    entry: str  # the function that every rank calls with the context, as `module:function`
    code: Path | None = None  # the copy of the sources that the job imports; None in a rank, which has imported it

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
        logger.info("Python and its imports took %.1f s of CPU", time.process_time())
        stage(self.context)

    @property
    def checked_python(self) -> list[str]:
        """The options of Python with which it checks the copy of the sources, and then does what follows them."""
        assert self.code is not None
        program = f"exec({Path(trust.__file__).read_text()!r})"  # in one line, as it becomes a word of a script's line
        groups = ",".join(map(str, trusted_groups(self.key.cluster))) or "-"
        return ["-I", "-c", program, str(self.code), self.code.name, groups]

    @property
    def arguments(self) -> list[str]:
        """The words after `python` that start one rank of the job."""
        return [*self.checked_python, "-m", "slurm.entry", str(self.key.context_path), self.entry]


class Job(Protocol):
    """A job of a backend, submitted or found again. Its methods raise SilentSchedulerError if nobody answers."""

    backend: str
    job_id: str
    attached: bool  # whether the job was found pending or running, rather than submitted by this flow
    ask_seconds: float  # how many seconds the flow waits before it asks for the state again

    def state(self) -> State:
        """Ask the scheduler for the job's state."""

    def cancel(self) -> None:
        """End the job, or at least tell the scheduler to. An error says how to end it by hand."""

    def log(self, rank: int) -> Path:
        """The file to which a rank prints, which may not exist yet."""

    def failure(self, ranks: int) -> Failure:
        """Which of the job's `ranks` failed first, and how it ended, as far as that is known."""


class Backend(Protocol):
    """A scheduler. The flow calls the methods from `problems` to `submit`; the ranks of a job call the others.

    They raise JobError, with the reason in one line, if the scheduler cannot be used from here or refuses a job, and
    SilentSchedulerError if it does not answer.
    """

    name: str  # the value of `cluster.backend` that chooses it

    def problems(self, config: Config) -> list[str]:
        """One line for each reason why a run cannot use this scheduler from here."""

    def options(self, config: Config, stage: StageName) -> str:
        """How a stage's job will be submitted, for `specrl run --dry-run`; may be empty."""

    def find(self, key: JobKey) -> Job | None:
        """The stage's job if it is pending or running, whoever submitted it, or None.

        A submitted job must be found at every instant, or else it would be submitted a second time.
        """

    def submit(self, request: StageRequest, environment: dict[str, str]) -> Job | None:
        """Submit a job that runs `python` with `request.arguments` in every rank, in the folder `request.key.folder`.

        Every process of the job needs the variables of `environment` before Python starts. If an answer did not come,
        the job is looked for before it is submitted again. None means that the stage has finished meanwhile.
        """

    def rank_environment(self, request: StageRequest) -> dict[str, str]:
        """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and the network interfaces of this rank.

        A rank asks for it before anything else.
        """

    def place(self, request: StageRequest) -> JobPlace:
        """What the scheduler says about this job, within seconds. The first two ranks ask."""

    def requeue(self, request: StageRequest) -> None:
        """Have the scheduler start this job again after its end, which is near.

        If it cannot, and the job simply ends, the flow that waits for it submits another one.
        """

    def why_ended(self, segment: Segment) -> Reason:
        """Why an earlier job of the stage ended, if the job could not say so itself."""
