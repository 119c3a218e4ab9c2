"""Processes that take one step at a time, each when it is told to, so that no other computes while one is timed."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from specrl.processes import start_helper


class Worker(AbstractContextManager["Worker"]):
    """A rank of a training, as its parent sees it. It is ready when its first answer has come."""

    def __init__(self, name: str, context: Path, environment: Mapping[str, str], log: Path) -> None:
        """Start `specrl.bench.run.rank`, with additions to this environment; `name` is for error messages."""
        self.name, self.log = name, log
        self.process, self.answers = start_helper("specrl.bench.run.rank", {**os.environ, **environment})
        with suppress(OSError):  # it has ended already, as whoever waits for it will find
            self.answers.send((context, log))

    def end(self) -> None:
        """There are no more steps; this does not wait."""
        self.answers.close()

    def await_answer(self) -> None:
        """Wait until the process is ready, or has taken its step."""
        try:
            self.answers.recv()
        except (EOFError, OSError):
            killed = self.process.wait() == -signal.SIGKILL
            why = " (it was killed, as Linux does where memory is short)" if killed else ""
            raise RuntimeError(f"{self.name} ended before its step{why}; log: {self.log}") from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self.process.kill()
        self.answers.close()
        self.process.wait()


def await_all(workers: Sequence[Worker]) -> None:
    """Wait until all processes are ready, or have taken their step.

    They may wait for each other, so that without one that has ended the others would never answer.
    """
    waiting: dict[Any, Worker] = {worker.answers: worker for worker in workers}
    while waiting:
        for answers in wait(list(waiting)):
            waiting.pop(answers).await_answer()
