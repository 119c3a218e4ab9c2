"""The heartbeats of a job's ranks: one small file per rank on the shared file system, and a flag when one hangs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

HANG_FILE = "hang"


def node_name() -> str:
    """The name of this node, for Slurm where it is Slurm's."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


class Heartbeats:
    """Writes this rank's heartbeat into a folder of this job alone, and watches those of others.

    The first rank watches all others, and the second one watches the first. What counts is that a file changes, since
    the clocks of hosts differ.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)
        self._folder, self._rank, self._clock = folder, rank, clock
        self._beats = 0
        self.silent_node = ""
        """The node of the rank that has stopped, where that rank has ever given a sign."""
        watched = {0: range(1, world_size), 1: range(1)}.get(rank, range(0))
        self._seen = {other: ("", clock()) for other in watched}

    def beat(self) -> None:
        self._beats += 1
        self._path(self._rank).write_text(f"{self._beats} {node_name()}")

    def stopped(self, hang_seconds: float, start_seconds: float) -> str | None:
        """Say in one line which watched rank is silent for too long (`start_seconds` until its first sign), or None."""
        now = self._clock()
        for rank, (text, since) in self._seen.items():
            found = self._read(rank)
            if found and found != text:  # a rank whose disk no longer answers stops in the midst of writing: no sign
                self._seen[rank] = (found, now)
            elif now - since > (hang_seconds if text else start_seconds):
                self.silent_node = text.partition(" ")[2]
                return f"rank {rank} has given no sign of life for {now - since:.0f} s"
        return None

    def look_anew(self) -> None:
        """Count from now on, because this process could not look for a while, and the others may have been held too."""
        now = self._clock()
        self._seen = {rank: (text, now) for rank, (text, _) in self._seen.items()}

    def report_hang(self, text: str) -> None:
        (self._folder / HANG_FILE).write_text(text)

    def reported_hang(self) -> bool:
        return (self._folder / HANG_FILE).exists()

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}"

    def _read(self, rank: int) -> str:
        try:
            return self._path(rank).read_text()  # opening a file makes NFS look again, asking for its times does not
        except FileNotFoundError:
            return ""
