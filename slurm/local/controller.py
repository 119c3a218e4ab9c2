"""The process that starts and watches the ranks of a local job, in a session of its own.

`python -m slurm.local.controller FOLDER RECORD RESULT` outlives the flow that started it. While it lives, it holds a
lock beside its record; the kernel releases the lock however the process dies. On one machine, a stage's job is running
if and only if that lock is held, since process ids repeat.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout
from submitit.local.local import Controller

from slurm.backend import CONTEXT_FILE, Record
from slurm.ranks.supervisor import ATTEMPT, PREEMPTION_SIGNAL, WALLTIME_SIGNAL
from specrl.artifacts import write_json
from specrl.context import StageContext
from specrl.lifetime.segments import Reason, begin_segment, end_segment, last_recorded_step, read_segments
from specrl.processes import start_ticks

KILLED = (-signal.SIGKILL, -signal.SIGABRT, -WALLTIME_SIGNAL, -PREEMPTION_SIGNAL, 128 + PREEMPTION_SIGNAL)
"""The exit codes of ranks that a signal ended. NCCL aborts a process whose peers are gone, and a rank hears the two
last signals only once it has been set up."""
END_AT = "SPECRL_END_AT"
"""The variable in which the ranks find the Unix time at which the controller will end them."""

FAILURE_GRACE_SECONDS = 5
"""How long the other ranks may still run after one has failed, so that they notice it and say so in their logs."""
LOCK_SECONDS = 3
"""How long the controller tries to take the lock, which a flow that looks whether it is taken holds for an instant."""


class LocalController(Controller):
    """Starts the ranks as submitit's controller does, ends all of them when one fails, and starts them again where the
    stage is to go on, as a scheduler would queue its job again."""

    timed_out = False
    exit_codes: Sequence[int | None] = ()

    def __init__(self, folder: Path, context: StageContext) -> None:
        super().__init__(folder)
        self.context = context

    def run(self, max_retry: int | None = None) -> None:
        """Run the ranks, and run them again for as long as the stage is to go on.

        Args:
            max_retry: How many times the ranks are started at most; None for as often as the stage wants.
        """
        for attempt in count():
            begun = len(read_segments(self.context.stage_dir))
            os.environ.update({ATTEMPT: str(attempt), END_AT: str(time.time() + self.timeout_s)})
            try:
                self.start_tasks()
                self.wait()
            finally:
                self.kill_tasks()
            if attempt + 1 == max_retry or not self._goes_on(begun):
                return

    def _goes_on(self, begun: int) -> bool:
        """Say how the segment ended if its ranks could not, and return whether the stage goes on in another one.

        Args:
            begun: The number of segments before this one.
        """
        stage_dir, cluster = self.context.stage_dir, self.context.config.cluster_of(self.context.stage)
        segments = read_segments(stage_dir)
        reason: Reason = "failed"
        if self.timed_out:
            reason = "walltime"
        elif any(code in KILLED for code in self.exit_codes):
            reason = "killed"
        if len(segments) == begun:  # the ranks ended before they were set up
            segments.append(begin_segment(stage_dir, self.pid, os.uname().nodename))
        return end_segment(stage_dir, segments[-1].number, reason, last_recorded_step(stage_dir), cluster)

    def wait(self, freq: int = 10) -> Sequence[int | None]:
        """Wait for the ranks, and return their exit codes when all have ended or when it is time to end them.

        Args:
            freq: How many times a second the ranks are looked at.
        """
        self.timed_out = False
        limit = time.monotonic() + self.timeout_s
        warn_at: float | None = limit - self.signal_delay_s
        give_up_at = limit
        while True:
            self.exit_codes = codes = [task.poll() for task in self.tasks]
            now = time.monotonic()
            if None not in codes:
                return codes
            if now > give_up_at:
                self.timed_out = now > limit
                return codes
            if any(codes):  # one failed, or left to be started anew
                give_up_at = min(give_up_at, now + FAILURE_GRACE_SECONDS)
            if warn_at is not None and now > warn_at:
                warn_at = None
                self._forward_signal(WALLTIME_SIGNAL)
            time.sleep(1 / freq)


def main(arguments: list[str]) -> None:
    """Take the lock and run the job, unless another controller has the lock or the stage has finished.

    Args:
        arguments: The job's folder, its record, and the stage's result file.
    """
    folder, record_path, result_path = (Path(argument) for argument in arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
    try:
        lock = FileLock(lock_path(record_path)).acquire(timeout=LOCK_SECONDS)
    except Timeout:
        return  # another controller was faster; the flow finds that one
    with lock:
        if result_path.exists():
            return
        started = start_ticks(os.getpid())
        Record("local", str(os.getpid()), started, os.uname().nodename, time.time()).write(record_path)
        controller = LocalController(folder, StageContext.load(folder / CONTEXT_FILE))
        try:
            controller.run()
        finally:
            outcome = {"exit_codes": controller.exit_codes, "timed_out": controller.timed_out}
            write_json(outcome_path(folder, str(os.getpid())), outcome)


def lock_path(record_path: Path) -> Path:
    """Return the file that the controller of a job holds locked."""
    return record_path.with_suffix(".lock")


def outcome_path(folder: Path, job_id: str) -> Path:
    """Return the file that says how the ranks of a local job ended; it is missing if its controller was killed."""
    return folder / f"{job_id}_ended.json"


if __name__ == "__main__":
    main(sys.argv[1:])
