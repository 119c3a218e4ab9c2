"""Ranks in processes of their own on this machine, which do together what their parent tells them."""

from __future__ import annotations

import os
import signal
import subprocess
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from specrl.processes import LOOPBACK, free_port, last_line, start_helper


class Workers:
    """The ranks of one process group, each with its own cores if there are enough; ready after the first answers."""

    def __init__(self, module: str, name: str, folder: Path, ranks: int, threads: int, *send: object) -> None:
        """Start `main` of a module `ranks` times; the log of each is in `folder`."""
        port, cores = free_port(), sorted(os.sched_getaffinity(0))
        self._started: dict[Connection, tuple[subprocess.Popen[bytes], str, Path]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            names |= {"MASTER_PORT": port, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
            environment = {**os.environ, **{key: str(value) for key, value in names.items()}, "MASTER_ADDR": LOOPBACK}
            log = folder / f"rank-{rank}.log"
            with log.open("w") as output:
                process, connection = start_helper(module, environment, output, send=send)
            self._started[connection] = process, f"rank {rank} of {name}", log
            if len(own := cores[rank * threads : (rank + 1) * threads]) == threads:
                os.sched_setaffinity(process.pid, own)

    def tell(self, order: object = None) -> list[Any]:
        """Have all ranks do something, and return their answers."""
        for connection in self._started:
            connection.send(order)
        return self.answers()

    def answers(self) -> list[Any]:
        """Wait until all ranks have answered, and return the answers in any order.

        Fail as soon as one has ended: the others may be waiting for it and would never answer.
        """
        waiting: set[Any] = set(self._started)
        found = []
        while waiting:
            for connection in wait(list(waiting)):
                waiting.remove(connection)
                found.append(self._answer(connection))
        return found

    def _answer(self, connection: Any) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError):
            process, name, log = self._started[connection]
            killed = process.wait() == -signal.SIGKILL
            why = "it was killed, as Linux does where memory is short" if killed else last_line(log)
            raise RuntimeError(f"{name} ended before its step: {why}; log: {log}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for connection, (process, *_) in self._started.items():
            if error is not None:
                process.kill()
            connection.close()  # before any is waited for: they leave together
        for process, *_ in self._started.values():
            process.wait()
