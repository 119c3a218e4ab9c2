"""The lifetime of a rank: whether the next RL step may begin, and whether the current work takes too long.

A thread of the rank listens for whatever ends jobs (the scheduler, `specrl stop`, a hanging rank) and records it in
this object. The loop asks at the boundary of each step, and all ranks get the same answer. Outside a job, the lifetime
has no end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from specrl.config import ClusterConfig
from specrl.lifetime.segments import Reason

if TYPE_CHECKING:  # flows do not import NumPy and torch
    from specrl.distributed import Ranks

RECENT_STEPS = 20  # recent steps from which the duration of a step is estimated
STEP_MARGIN, CHECKPOINT_MARGIN = 1.25, 1.5  # factor on the longest recent step and checkpoint, as a bound for the next
HANG_FACTOR = 10  # factor on the median of recent steps beyond which a step counts as hanging


@dataclass(frozen=True)
class Stop:
    """A request to leave the job."""

    reason: Reason
    text: str  # who requested it, in a few words


class LeftJobError(BaseException):
    """All ranks leave the stage at a step boundary, where another job continues. This is not a failure."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.text)
        self.stop = stop


class Lifetime:
    """What a rank knows about the end of its job and the duration of its steps.

    The stage calls `expect_steps`, `begin_steps`, `saved`, `at_boundary` and `end_steps`, in this order; one thread may
    call the other methods at any time.
    """

    def __init__(self, cluster: ClusterConfig | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the lifetime of a new rank, on a monotonic clock."""
        self.leave_by: float | None = None  # on this object's clock; None if no end of the job is known
        self.first_step: int | None = None
        self.step: int | None = None  # the current step; None before the first and after the last one
        self._cluster, self._clock = cluster or ClusterConfig(), clock
        self._expects_steps = False
        self.stop: Stop | None = None
        self._began_at = clock()
        self._seconds: list[float] = []
        self._past_seconds: list[float] = []
        self._validations: list[float] = []
        self._validates = False
        self._checkpoint_seconds = 0.0

    @property
    def has_steps(self) -> bool:
        return self.step is not None

    @property
    def last_step(self) -> int | None:
        """The last step completed in this job."""
        if self.first_step is None:
            return None
        done = self.first_step + len(self._seconds) - 1
        return done if done >= self.first_step else None

    def ask_to_leave(self, stop: Stop, leave_by: float | None = None) -> None:
        """Make the ranks leave at the next boundary; the first request and the earliest time win."""
        self.stop = self.stop or stop
        if leave_by is not None:
            self.leave_by = leave_by if self.leave_by is None else min(self.leave_by, leave_by)

    def expect_steps(self) -> None:
        """Announce that the stage has steps, so that its start is watched too."""
        self._expects_steps, self._began_at = True, self._clock()

    def begin_steps(
        self, step: int, past_seconds: Sequence[float] = (), past_validations: Sequence[float] = ()
    ) -> None:
        """Announce the first step, and the durations of earlier jobs' steps and validations."""
        self.first_step = self.step = step
        self._past_seconds = list(past_seconds)[-RECENT_STEPS:]
        self._validations = list(past_validations)
        self._began_at = self._clock()

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Measure a validation separately from its step, whose usual time it may exceed many times over."""
        step_began_at, self._began_at, self._validates = self._began_at, self._clock(), True
        try:
            yield
        finally:
            seconds = self._clock() - self._began_at
            self._validations.append(seconds)
            self._began_at, self._validates = step_began_at + seconds, False

    def at_boundary(self, ranks: Ranks, step: int, *, validates: bool = False) -> Stop | None:
        """Why this step, which may include a validation, must not begin, or None (collective)."""
        assert self.first_step is not None, "begin_steps comes first"
        now = self._clock()
        if step > self.first_step:
            self._seconds.append(now - self._began_at)
        self.step, self._began_at = step, now
        stops = ranks.gather(self.stop or self._too_late(now, validates))
        return next((stop for stop in stops if stop is not None), None)

    def saved(self, seconds: float) -> None:
        self._checkpoint_seconds = max(self._checkpoint_seconds, seconds)

    def end_steps(self) -> None:
        now = self._clock()
        self._seconds.append(now - self._began_at)
        self.step, self._began_at = None, now

    def held_up(self, seconds: float) -> None:
        """Discount the time for which this process was held up, as by a scheduler that suspends jobs."""
        self._began_at += seconds

    def overdue(self) -> str | None:
        """What takes too long and since when, in one line, or None."""
        seconds, limit = self._clock() - self._began_at, self._limit_seconds()
        if seconds <= limit:
            return None
        what = "the start of the stage" if self.first_step is None else "what follows the steps"
        if self.step is not None:
            what = f"{'the validation in ' if self._validates else ''}step {self.step}"
        known = self._usual_seconds()
        usual = f", where {median(known):.1f} s are usual" if self.step is not None and known else ""
        return f"{what} has taken {seconds:.0f} s{usual}"

    def _limit_seconds(self) -> float:
        if not self._expects_steps:
            return float("inf")  # only the job's time limit bounds such a stage
        known = self._usual_seconds()
        if self.step is None or not known:
            return 60 * self._cluster.start_minutes
        return max(60 * self._cluster.hang_minutes, HANG_FACTOR * median(known))

    def _usual_seconds(self) -> list[float]:
        return (self._validations if self._validates else self._seconds)[-RECENT_STEPS:]

    def _too_late(self, now: float, validates: bool) -> Stop | None:
        """A request to leave, or None if the next step and a checkpoint fit into the remaining time.

        The first step of a job always begins: if it does not fit now, it does not fit into another job either.
        """
        if self.leave_by is None or not self._seconds:
            return None
        longest = max([*self._seconds[-RECENT_STEPS:], *self._past_seconds[len(self._seconds) :]])
        longest += max(self._validations, default=0.0) if validates else 0.0
        needed = STEP_MARGIN * longest + CHECKPOINT_MARGIN * self._checkpoint_seconds
        left = self.leave_by - now
        if needed <= left:
            return None
        return Stop("walltime", f"{left:.0f} s are left, a step with a checkpoint may take {needed:.0f} s")


_of_process = [Lifetime()]


def current() -> Lifetime:
    return _of_process[-1]


def set_current(lifetime: Lifetime) -> None:
    """Set the lifetime of this process, before the stage begins."""
    _of_process.append(lifetime)
