"""Processes that are forked where a new Python would import everything again.

A fork has the modules of its parent, which take a new process many seconds, and shares their memory. It must not have
the parent's threads, locks and sockets: so nothing is forked from a process that has computed anything.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from setproctitle import setproctitle

STANDARD = frozenset(range(3))
INHERITED = "SPECRL_INHERITED_FILES"
"""The variable in which a controller finds the file descriptors of the imported libraries, which its ranks keep."""


class Fork:
    """A child of this process, with the methods of `subprocess.Popen` that submitit's controller calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, the negative number of the signal that ended the process, or None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


@dataclass(frozen=True)
class Command:
    """What a fork is to run: `python -m MODULE ARGUMENTS`."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    """Variables that are added to those of the parent."""
    log: Path
    """The file to which standard output and standard error are appended."""

    @classmethod
    def of(cls, words: Sequence[str], environment: Mapping[str, str], log: Path) -> Command:
        """Return the command with these words: an interpreter, its options, `-m`, a module, and arguments."""
        place = words.index("-m") + 1
        return cls(words[place], words[place + 1 :], environment, log)

    def fork(self, keep: frozenset[int], first: Callable[[], None] = lambda: None) -> Fork:
        """Run the command in a fork of this process.

        Args:
            keep: The file descriptors that the fork keeps beside the standard ones.
            first: A function that the fork calls before anything else.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            self._run(keep, first)
        return Fork(pid)

    def _run(self, keep: frozenset[int], first: Callable[[], None]) -> NoReturn:
        code = 1
        try:
            first()
            self._become(keep)
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:  # as at the top of every Python process; the parent's frames must not be unwound
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _become(self, keep: frozenset[int]) -> None:
        """Turn from a copy of the parent into what a new process with this command would be."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(self.environment)
        sys.argv = [self.module, *self.arguments]
        setproctitle(" ".join([sys.executable, "-u", "-m", *sys.argv]))
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        empty = os.open(os.devnull, os.O_RDONLY)
        for number, file in ((0, empty), (1, log), (2, log)):
            os.dup2(file, number)
        for number in open_files() - STANDARD - keep:
            os.close(number)


def open_files() -> frozenset[int]:
    """Return the file descriptors that this process has open."""
    found = (int(path.name) for path in Path("/proc/self/fd").iterdir())
    return frozenset(number for number in found if _is_open(number))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # the one by which the folder was read
        return False
    return True
