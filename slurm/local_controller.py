"""The process that holds a local job: `python -m slurm.local_controller FOLDER RECORD RESULT`, in its own session.

It outlives the flow that started it. For as long as it lives it holds a lock beside its record; the kernel drops the
lock however the process dies. That lock is what "the stage's job is running" means on one machine, since process ids
repeat.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout
from submitit.local.local import Controller, LocalJobEnvironment

from slurm.backend import Record
from specrl.artifacts import write_json
from specrl.processes import start_ticks

FAILURE_GRACE_SECONDS = 5
"""How long the other ranks have, once one has failed, to notice it and say so in their logs before they are ended."""
LOCK_SECONDS = 3
"""How long to try for the lock. A flow that only looks whether the lock is taken holds it for an instant."""


class LocalController(Controller):
    """submitit's controller, which starts the ranks. This one ends all of them when one fails, and notes how."""

    timed_out = False
    exit_codes: Sequence[int | None] = ()

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
                self._forward_signal(LocalJobEnvironment._usr_sig())
            time.sleep(1 / freq)


def main(arguments: list[str]) -> None:
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
        controller = LocalController(folder)
        try:
            controller.run()
        finally:
            outcome = {"exit_codes": controller.exit_codes, "timed_out": controller.timed_out}
            write_json(outcome_path(folder, str(os.getpid())), outcome)


def lock_path(record_path: Path) -> Path:
    return record_path.with_suffix(".lock")


def outcome_path(folder: Path, job_id: str) -> Path:
    """Return the file that says how the ranks of a local job ended; it is missing if its controller was killed."""
    return folder / f"{job_id}_ended.json"


def is_locked(record_path: Path) -> bool:
    """Return whether a controller is alive for this stage, on this host or on another one of a shared file system."""
    path = lock_path(record_path)
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


if __name__ == "__main__":
    main(sys.argv[1:])
