"""The log of a run or a stage on disk: appended entries, and what each tracker has received of them.

A stage writes only here, so that logging needs no server. A run and each of its stages have their own log, in the
folder `tracking`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from specrl.artifacts import append_line, read_file, write_text

FOLDER = "tracking"
ENTRIES_FILE, FILES_FOLDER = "log.jsonl", "files"  # the folder contains artifacts that exist nowhere else


@dataclass(frozen=True)
class Entry:
    """An entry to be sent."""

    kind: str  # `start`, `metrics`, or another name in `specrl.tracking.sender.SENDERS`
    time_ms: int
    """When it was logged, in milliseconds since the epoch; trackers get this time however late the entry arrives."""
    values: Mapping[str, Any]
    begin: int
    end: int  # the byte positions of this entry and of the next


class Log:
    """The entries of a run or a stage. One process appends, and one (perhaps the same) sends."""

    def __init__(self, folder: Path) -> None:
        """Open the log in a run's or a stage's folder, which need not exist yet."""
        self.owner = folder
        self.folder = folder / FOLDER
        self.path = self.folder / ENTRIES_FILE
        self._lock = threading.Lock()

    def append(self, kind: str, **values: Any) -> None:
        """Append an entry; an OSError if the disk fails."""
        line = json.dumps({"kind": kind, "time_ms": int(time.time() * 1000), **values}, default=str)
        with self._lock:
            append_line(self.path, line, flush=False)

    def entries(self, position: int = 0) -> Iterator[Entry]:
        """Yield the complete entries from a position on, skipping invalid lines."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                begin, position = position, position + len(line)
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    values = json.loads(line)
                    yield Entry(values.pop("kind"), values.pop("time_ms"), values, begin, position)

    def first_start(self) -> Mapping[str, Any]:
        """The values of the first start of the run or the stage; empty before that."""
        return next((entry.values for entry in self.entries() if entry.kind == "start"), {})

    def flush(self) -> None:
        """Flush entries to disk before they are sent, or the recorded position could lie beyond the end."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())


class Arrived(BaseModel):
    """What a tracker has received: everything before a position, except what is missing."""

    position: int = 0
    missing: dict[int, str] = {}
    """The positions of earlier entries that have not arrived, and why they were refused, if they were."""
    versions: dict[str, str] = {}  # the registered model versions by model name


class Sent:
    """The file of what a tracker has received; one file per tracker, because each sends from its own process."""

    def __init__(self, log: Log, tracker: str = "mlflow") -> None:
        self.log, self._path = log, log.folder / f"sent-{tracker}.json"
        self.now = self._read()

    def refresh(self) -> None:
        """Read the file again, because another process may have sent something."""
        noted = self._read()
        if noted.position >= self.now.position:
            self.now = noted

    def _read(self) -> Arrived:
        try:
            return Arrived.model_validate_json(read_file(self._path))
        except (OSError, ValueError):
            return Arrived()

    def waiting(self) -> Iterator[Entry]:
        return self.log.entries(self.now.position)

    def retried(self) -> list[Entry]:
        found = (next(self.log.entries(begin), None) for begin in sorted(self.now.missing))
        return [entry for entry in found if entry is not None]

    def is_complete(self) -> bool:
        """Whether everything has arrived."""
        return not self.now.missing and not self.waits()

    def waits(self) -> bool:
        """Whether something was not yet sent or could not be uploaded."""
        return "" in self.now.missing.values() or next(self.waiting(), None) is not None

    def note(self, entries: Sequence[Entry], reason: str | None = None) -> None:
        """Record that these entries arrived, or why they did not.

        While the disk is full, only this process knows this; another process may send them again.
        """
        self.now.position = max(self.now.position, entries[-1].end)
        for entry in entries:
            self.now.missing.pop(entry.begin, None)
            if reason is not None:
                self.now.missing[entry.begin] = reason
        with contextlib.suppress(OSError):
            write_text(self._path, self.now.model_dump_json())

    def forget(self) -> None:
        """Have everything sent again, to a new run."""
        self._path.unlink(missing_ok=True)
        self.now = Arrived()
