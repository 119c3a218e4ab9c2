"""Wait for a job, with a limit on every kind of waiting, and say in one line what went wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from slurm.backend import Job, JobError, SilentSchedulerError, State
from slurm.failures import explain
from slurm.submit import SILENCE_SECONDS
from slurm.walltime import longest_minutes
from specrl.artifacts import RESULT_FILE
from specrl.context import StageContext
from specrl.progress import ProgressState, read_progress

POLL_SECONDS = 0.5
"""The pause between two looks at a job's files, in seconds. Its scheduler is asked every `job.ask_seconds`."""
LEAVING_ASK_SECONDS = 1.0
"""The pause between two questions to the scheduler once the result exists and the job is about to end."""
LEAVE_SECONDS = 60
"""How long the ranks may take to end after the stage's result is written, before the job is cancelled."""
FILES_SECONDS = 30
"""How long a result may take to become visible on a shared file system after its job has ended."""
OVERTIME_MINUTES = 10
"""How long the flow waits for the scheduler to end a job whose time, with all repetitions, is up."""

OnPoll = Callable[[State, ProgressState | None], None]


def wait(job: Job, context: StageContext, on_poll: OnPoll, clock: Callable[[], float] = time.monotonic) -> None:
    """Wait until the stage's result exists and its job has ended.

    Args:
        on_poll: Called every `POLL_SECONDS` with the job's state and the stage's progress.
        clock: Returns a time in seconds that only goes forward.

    Raises:
        JobError: The job failed, or waited or ran for longer than it may. The message names stage, job, error and log.
    """
    watch = _Watch(job, context, clock)
    while not watch.finished():
        on_poll(watch.state, read_progress(context.stage_dir))
        time.sleep(POLL_SECONDS)


class _Watch:
    """The state of a job over time, and since when it has been in that state."""

    def __init__(self, job: Job, context: StageContext, clock: Callable[[], float]) -> None:
        self.job, self.context, self.clock = job, context, clock
        self.state = State("pending", "SUBMITTED")
        self.since = self.answered_at = clock()
        self.asked_at = float("-inf")
        self.result_at: float | None = None

    def finished(self) -> bool:
        """Look at the job once more, and return whether the stage is finished.

        Raises:
            JobError: The job failed, or waited or ran for longer than it may.
        """
        now = self.clock()
        if self.result_at is None and self._has_result():
            self.result_at = now
        self._ask(now)
        if self.result_at is not None:
            if self.state.phase != "ended" and now - self.result_at > LEAVE_SECONDS:
                self.job.cancel()  # a rank hangs on its way out and would keep the allocation
                return True
            return self.state.phase == "ended"
        if self.state.phase == "ended" and now - self.since > (0 if self.state.failed else FILES_SECONDS):
            raise JobError(explain(self.job, self.context, self.state))
        self._check_limits(now)
        return False

    def _has_result(self) -> bool:
        if not (self.context.stage_dir / RESULT_FILE).exists():
            os.scandir(self.context.stage_dir).close()  # opening the folder makes NFS look again
            return False
        return True

    def _ask(self, now: float) -> None:
        pause = self.job.ask_seconds if self.result_at is None else LEAVING_ASK_SECONDS
        if self.state.phase == "ended" or now - self.asked_at < pause:
            return
        self.asked_at = now
        try:
            state = self.job.state()
        except SilentSchedulerError as error:
            if now - self.answered_at > SILENCE_SECONDS:
                raise JobError(
                    f"{self._name()}: {self.job.backend} has not answered for {SILENCE_SECONDS} s ({error})"
                ) from error
            return
        self.answered_at = now
        if state.phase != self.state.phase:
            self.since = now
        self.state = state
        if state.phase == "ended" and self.result_at is None and self._has_result():
            self.result_at = now

    def _check_limits(self, now: float) -> None:
        minutes = (now - self.since) / 60
        if self.state.phase == "pending" and minutes > self.context.config.cluster.queue_minutes:
            self.job.cancel()
            limit = f"cluster.queue_minutes = {self.context.config.cluster.queue_minutes}"
            raise JobError(f"{self._name()} waited in the queue for longer than {limit}, and was cancelled")
        allowed = self.context.config.resources_of(self.context.stage)
        if self.state.phase == "running" and minutes > longest_minutes(allowed) + OVERTIME_MINUTES:
            self.job.cancel()
            raise JobError(f"{self._name()} ran far beyond resources.minutes = {allowed.minutes}, and was cancelled")

    def _name(self) -> str:
        return f"{self.context.stage} (job {self.job.job_id})"
