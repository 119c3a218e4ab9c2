"""Wait for a job, with a limit on every wait, and say in one line what went wrong."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from slurm.backend import Job, JobError, SilentSchedulerError, State, StoppedError, UnseenError, stop_asked
from slurm.failures import explain
from slurm.submit import SILENCE_SECONDS
from specrl.artifacts import RESULT_FILE, is_passing
from specrl.context import StageContext
from specrl.lifetime.segments import (
    AGAIN,
    Reason,
    Segment,
    begin_segment,
    end_segment,
    last_recorded_step,
    read_segments,
)
from specrl.progress import ProgressState, read_progress

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # between checks of a job's files; its scheduler is asked every `job.ask_seconds`
SOON_SECONDS = 2.0  # between scheduler queries while the job is about to change
LEAVE_SECONDS = 60  # for the ranks to end after the stage's result is written, before the job is cancelled
RETURN_SECONDS = 30
"""The limits, after a job's end, for its result to appear on a shared file system, and for a scheduler that took the
job away to requeue it."""
OVERTIME_MINUTES = 10  # for the scheduler to end a job whose time is up
LEAVING_MINUTES = 60  # for the remains of a job to end
RETURNING: frozenset[Reason | None] = frozenset({"preempted", "node lost"})
"""The reasons after which schedulers usually requeue the job themselves."""

OnPoll = Callable[[State, ProgressState | None], None]


def wait(job: Job, context: StageContext, on_poll: OnPoll, clock: Callable[[], float] = time.monotonic) -> bool:
    """Wait until the stage's result exists and its job has ended (True), or until the stage needs another job (False).

    A JobError names stage, job, error and log; an UnseenError means that the job continues but cannot be watched.
    """
    watch, seen_at = _Watch(job, context, clock), clock()
    while True:
        try:
            if watch.over():
                return watch.result_at is not None
            seen_at = clock()
        except OSError as error:
            if not is_passing(error):
                raise
            if clock() - seen_at > SILENCE_SECONDS:
                words = f"{error.strerror}: {error.filename or context.stage_dir}"
                raise UnseenError(
                    f"{context.stage} (job {job.job_id}) goes on, but its files cannot be read ({words}); follow it "
                    f"again with: specrl resume {context.config.name}"
                ) from error
        on_poll(watch.state, read_progress(context.stage_dir))
        time.sleep(POLL_SECONDS)


def stopped_line(context: StageContext) -> str:
    """The message for a run stopped before or during this stage."""
    segments = read_segments(context.stage_dir)
    step = segments[-1].last_step if segments else None
    where = f"in {context.stage}" if step is None else f"in {context.stage} after step {step}"
    return f"run {context.config.name} was stopped {where}; continue it with: specrl resume {context.config.name}"


class _Watch:
    """A job's state, and since when it has been in it."""

    def __init__(self, job: Job, context: StageContext, clock: Callable[[], float]) -> None:
        self.job, self.context, self.clock = job, context, clock
        self.cluster = context.config.cluster_of(context.stage)
        self.state = State("pending", "SUBMITTED")
        self.since = self.answered_at = clock()
        self.asked_at = float("-inf")
        self.result_at: float | None = None
        self.num_segments = 0
        self.was_over: bool | None = None  # attached to in its last moments, so that another job follows

    def over(self) -> bool:
        """Check the job again; return whether the stage has finished or needs another job."""
        now = self.clock()
        if self.result_at is None and self._has_result():
            self.result_at = now
        self._ask(now)
        if self.result_at is not None:
            if self.state.phase != "ended" and now - self.result_at > LEAVE_SECONDS:
                said = self._cancel()  # a rank hangs while exiting and would keep the allocation
                logger.warning("%s did not end after its result, and %s", self._name(), said)
                return True
            return self.state.phase == "ended"
        if self.state.phase == "ended":
            return self._ended_without_result(now - self.since)
        self._check_limits(now)
        return False

    def _ended_without_result(self, seconds: float) -> bool:
        """Whether another job is needed; False while this one, which ended so many seconds ago, may still continue."""
        context, returning = self.context, self.state.reason in RETURNING
        if self.was_over:
            return True
        reason = self._reason()
        if reason is None and seconds <= (RETURN_SECONDS if returning or not self.state.failed else 0):
            return False
        if reason == "stopped":
            raise StoppedError(stopped_line(context))
        if self._goes_on(reason):
            return True
        raise JobError(explain(self.job, context, self.state))

    def _reason(self) -> Reason | None:
        segments = self._segments()
        return segments[-1].reason if segments else None

    def _goes_on(self, reason: Reason | None) -> bool:
        """End the latest segment if no rank could; return whether the stage should continue in another job."""
        segments, stage_dir = self._segments(), self.context.stage_dir
        if reason is None:
            killed = self.job.failure(self.context.config.resources_of(self.context.stage).ranks).killed
            reason = self.state.reason or ("killed" if killed else "failed")
        # A job taken away before its ranks' setup counts too, or it could be submitted for ever.
        last = segments[-1] if segments else begin_segment(stage_dir, self.job.job_id, "")
        return end_segment(stage_dir, last.number, reason, last_recorded_step(stage_dir), self.cluster)

    def _segments(self) -> list[Segment]:
        return [segment for segment in read_segments(self.context.stage_dir) if segment.job_id == self.job.job_id]

    def _has_result(self) -> bool:
        if not (self.context.stage_dir / RESULT_FILE).exists():
            os.scandir(self.context.stage_dir).close()  # opening the folder makes NFS revalidate it
            return False
        return True

    def _ask(self, now: float) -> None:
        soon = self.result_at is not None or self.state.phase == "ended" or self._is_to_leave()
        pause = min(SOON_SECONDS, self.job.ask_seconds) if soon else self.job.ask_seconds
        if (self.state.phase == "ended" and self.state.reason not in RETURNING) or now - self.asked_at < pause:
            return
        self.asked_at = now
        try:
            state = self.job.state()
        except SilentSchedulerError as error:
            if now - self.answered_at > SILENCE_SECONDS:
                raise UnseenError(
                    f"{self._name()}: {self.job.backend} has not answered for {SILENCE_SECONDS} s ({error})"
                ) from error
            return
        if self.was_over is None:
            self.was_over = self.job.attached and state.is_leaving and self._reason() not in (None, "finished", *AGAIN)
        self.answered_at = now
        num_segments = len(self._segments())
        known = (self.state.phase, self.state.is_leaving, self.num_segments)
        if (state.phase, state.is_leaving, num_segments) != known:
            self.since, self.num_segments = now, num_segments
        self.state = state
        if state.phase == "ended" and self.result_at is None and self._has_result():
            self.result_at = now

    def _check_limits(self, now: float) -> None:
        if self.state.phase == "pending" and stop_asked(self.context.run_dir):
            raise StoppedError(f"{self._name()} {self._cancel()}; {stopped_line(self.context)}")
        if (limit := self._reached_limit((now - self.since) / 60)) is not None:
            raise JobError(f"{self._name()} {limit}, and {self._cancel()}")

    def _reached_limit(self, minutes: float) -> str | None:
        state, allowed = self.state, self.context.config.resources_of(self.context.stage).minutes
        if state.never:
            return f"can never start ({state.detail}: {state.never})"
        if state.phase == "pending" and minutes > self.cluster.queue_minutes:
            return f"waited in the queue for longer than cluster.queue_minutes = {self.cluster.queue_minutes}"
        if state.is_leaving and minutes > LEAVING_MINUTES:
            return f"has been ending for more than {LEAVING_MINUTES} minutes"
        goes_on = state.phase == "running" and not (state.in_time or state.is_leaving)
        if goes_on and minutes > allowed + OVERTIME_MINUTES:
            return f"ran far beyond resources.minutes = {allowed}"
        return None

    def _is_to_leave(self) -> bool:
        """Whether the files show, before the scheduler does, that the job is ending."""
        if self.state.phase == "pending":
            return stop_asked(self.context.run_dir)
        return self._reason() is not None

    def _cancel(self) -> str:
        try:
            self.job.cancel()
        except SilentSchedulerError as error:
            return f"was not cancelled: {error}"
        return "was cancelled"

    def _name(self) -> str:
        return f"{self.context.stage} (job {self.job.job_id})"
