"""Functions for processes, ports and locks of the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import signal
import socket
from pathlib import Path

from filelock import FileLock, Timeout

LOOPBACK = "127.0.0.1"
PORTS = range(15_000, 32_000)
"""The ports to choose from. Linux gives those from 32,768 on to outgoing connections, one of which could take a port
after it was found free and before somebody listens on it."""
PR_SET_PDEATHSIG = 1
"""The option of `prctl` that sets the signal which a process gets when its parent ends (Linux, `sys/prctl.h`)."""


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends, however the parent ends.

    Args:
        parent: The process id of the parent that started this process. It may have ended before this call, in which
            case no signal would ever come.

    Raises:
        SystemExit: The parent has ended already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent}, which started this one, has ended")


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None when it has ended.

    Process ids repeat; an id and a start time together name one process for good.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, started = fields[0], int(fields[19])
    return None if state in "ZX" else started


def cpu_seconds(session: int) -> float:
    """Return the CPU time that all living processes of a session have taken so far, in seconds; 0 if there are none."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock file, on this host or on another one that shares the file system.

    Raises:
        PermissionError: This user may not read the file.
    """
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True
    except PermissionError:  # a member of the group reads the run's folder, and may not write there
        return _is_locked_for_reading(path)


def _is_locked_for_reading(path: Path) -> bool:
    """Return whether a process holds a lock file that this user may only read."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def free_port(address: str = LOOPBACK) -> int:
    """Return a TCP port on which nothing listens at the moment."""
    return free_ports(1, address)[0]


def free_ports(count: int, address: str = LOOPBACK) -> list[int]:
    """Return `count` different TCP ports on which nothing listens at the moment."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        return [_bind(listener, address) for listener in listeners]  # all are open before the first closes: they differ


def _bind(listener: socket.socket, address: str) -> int:
    while True:
        port = random.SystemRandom().choice(PORTS)
        try:
            listener.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
