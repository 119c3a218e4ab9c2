"""The log of a rank: one line where a phase begins and one where it ends, with its time, in one format.

The lines go to standard error, which a job writes to the rank's own log file:

    2026-11-22 13:40:01 INFO  rank 3 step 12  generation begins
    2026-11-22 13:40:27 INFO  rank 3 step 12  generation took 26.1 s, 24.0 s of CPU

Because a phase says that it begins, the log of a rank that was killed ends with what it was doing.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from specrl.config.cluster import LogLevel

MOST_BYTES = 64 * 2**20  # the length at which a log is rotated
FORMAT = "%(asctime)s %(levelname)-7s %(where)s  %(message)s"
TIMES = "%Y-%m-%d %H:%M:%S"
PACKAGES = ("specrl", "slurm")
"""The packages of a rank whose loggers are set up; libraries' loggers stay as they are."""

logger = logging.getLogger(__name__)
_step: ContextVar[int | None] = ContextVar("step", default=None)


def set_up(level: LogLevel) -> None:
    """Send this project's log to standard error, in the format above; a second call replaces the first."""
    name = f"rank {os.environ.get('RANK', '0')}"

    def say_where(record: logging.LogRecord) -> bool:
        number = _step.get()
        record.where = name if number is None else f"{name} step {number}"
        return True

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, TIMES))
    handler.addFilter(say_where)
    for package in PACKAGES:
        parent = logging.getLogger(package)
        parent.handlers = [handler]
        parent.setLevel(level.upper())
        parent.propagate = False


def rotate(most_bytes: int = MOST_BYTES) -> None:
    """Rotate this process's log if it has grown long: copy it to `NAME.1` beside it, and truncate it.

    It is not renamed, because the scheduler has it open too; truncating is safe if all writers append.
    """
    file = sys.stderr.fileno()
    state = os.fstat(file)
    appends = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_APPEND
    if not (stat.S_ISREG(state.st_mode) and appends and state.st_size > most_bytes):
        return
    path = Path(f"/proc/self/fd/{file}").readlink()
    shutil.copyfile(path, path.with_name(f"{path.name}.1"))
    os.ftruncate(file, 0)


@contextmanager
def step(number: int) -> Iterator[None]:
    """Name the step in every line that is logged inside the block."""
    token = _step.set(number)
    try:
        yield
    finally:
        _step.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Log the start of the block and then how long it took, or after how long and with which error it failed."""
    started, cpu_started = time.monotonic(), time.process_time()
    logger.info("%s begins", name)
    try:
        yield
    except BaseException as error:
        logger.error("%s failed after %.1f s: %s", name, time.monotonic() - started, type(error).__name__)
        raise
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    logger.info("%s took %.1f s, %.1f s of CPU", name, seconds, cpu_seconds)
