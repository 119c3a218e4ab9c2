"""Processes that take one step at a time, each when it is told to, so that no other computes while one is timed.

For each line on its standard input, a process takes a step and answers with a line on its standard output.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

TURN, DONE = "step\n", "done\n"


class Worker(AbstractContextManager["Worker"]):
    """A process that takes steps, as its parent sees it. It is ready when its first answer has come."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start `python -m COMMAND PID`, with additions to this environment; `name` is for error messages."""
        self.name, self.log = name, log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, str(os.getpid())],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._orders, self.answers = self.process.stdin, self.process.stdout

    def begin_step(self) -> None:
        self._orders.write(TURN)
        self._orders.flush()

    def end(self) -> None:
        """There are no more steps; this does not wait."""
        self._orders.close()
        self.process.stdin = None  # or waiting for the process would write to it

    def await_answer(self) -> None:
        """Wait until the process is ready, or has taken its step."""
        if self.answers.readline() != DONE:
            killed = self.process.wait() == -signal.SIGKILL
            why = " (it was killed, as Linux does where memory is short)" if killed else ""
            raise RuntimeError(f"{self.name} ended before its step{why}; log: {self.log}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self.process.kill()
        self.process.communicate()


def await_all(workers: Sequence[Worker]) -> None:
    """Wait until all processes are ready, or have taken their step.

    They may wait for each other, so that without one that has ended the others would never answer.
    """
    waiting = {worker.answers: worker for worker in workers}
    while waiting:
        for answers in select.select(list(waiting), [], [])[0]:
            waiting.pop(answers).await_answer()


class Turns:
    def __init__(self) -> None:
        """Keep the standard output for answers; whatever else is written to it goes to the log from now on."""
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self) -> bool:
        """Wait for the next turn; False when there are no more."""
        return sys.stdin.readline() == TURN

    def done(self) -> None:
        self._answers.write(DONE)
        self._answers.flush()
