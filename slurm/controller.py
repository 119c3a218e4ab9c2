"""The process that holds a local job: `python -m slurm.controller FOLDER RECORD RESULT` in a session of its own.

It outlives the flow that started it. For as long as it lives it holds a lock beside its record; the kernel drops the
lock however it dies. That lock is what "the stage's job is running" means on one machine, since process ids repeat.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from submitit.local.local import Controller, LocalJobEnvironment

from slurm.records import Record, start_ticks, write_record
from specrl.artifacts import write_json

FAILURE_GRACE_SECONDS = 5
"""Time for the other ranks to notice that one failed, and to say so in their logs, before they are ended."""
LOCK_SECONDS = 3
"""A flow that only looks whether the lock is taken holds it for an instant: try again for this long."""


class LocalController(Controller):
    """submitit's controller, which starts the ranks; ends all of them when one fails, and notes how."""

    timed_out = False
    exit_codes: Sequence[int | None] = ()

    def wait(self, freq: int = 10) -> Sequence[int | None]:
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
    with lock_path(record_path).open("a") as lock:
        if not _take(lock.fileno()) or result_path.exists():
            return  # another controller was faster; the flow finds that one
        record = Record("local", str(os.getpid()), start_ticks(os.getpid()), os.uname().nodename, time.time())
        write_record(record_path, record)
        controller = LocalController(folder)
        try:
            controller.run()
        finally:
            ended = {"exit_codes": controller.exit_codes, "timed_out": controller.timed_out}
            write_json(folder / f"{os.getpid()}_ended.json", ended)


def lock_path(record_path: Path) -> Path:
    return record_path.with_suffix(".lock")


def is_locked(record_path: Path) -> bool:
    """Whether a controller lives for this stage, on this host or, on a shared file system, on another."""
    path = lock_path(record_path)
    if not path.exists():
        return False
    with path.open("a") as lock:
        return not _try(lock.fileno())


def _take(descriptor: int) -> bool:
    deadline = time.monotonic() + LOCK_SECONDS
    while not _try(descriptor):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
