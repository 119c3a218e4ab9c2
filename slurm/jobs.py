"""A job as the flow sees it, on either backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Phase = Literal["pending", "running", "ended"]


class JobError(RuntimeError):
    """A job could not be submitted, or failed, or ran out of time; the message is one line for people."""


class SilentSchedulerError(RuntimeError):
    """Slurm's controller did not answer this time; it may the next."""


@dataclass(frozen=True)
class State:
    phase: Phase
    detail: str
    """The backend's own word, such as Slurm's `TIMEOUT`, or how the ranks ended."""
    rank: int | None = None
    """The rank that failed first, where the backend tells."""


class Job(Protocol):
    @property
    def backend(self) -> Literal["local", "slurm"]: ...

    @property
    def job_id(self) -> str:
        """Slurm's job id, or the id of the local controller process."""

    @property
    def attached(self) -> bool:
        """Whether it was found running, not submitted."""

    @property
    def folder(self) -> Path:
        """Holds its logs, `JOB_RANK_log.out`."""

    def state(self) -> State:
        """
        Raises:
            SilentSchedulerError: it cannot be known just now.
        """

    def cancel(self) -> None:
        """End it; returns when it has been told to, and on this machine when it has ended."""
