"""What a run or a stage has logged, on disk: entries that are appended, and what of them each tracker has.

A stage writes here and nowhere else, so that logging needs no server. A run and each of its stages have a log of their
own, in the folder `tracking`.
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
ENTRIES_FILE, FILES_FOLDER = "log.jsonl", "files"  # the folder has artifacts that lie nowhere else


@dataclass(frozen=True)
class Entry:
    """One thing to be sent."""

    kind: str  # what it is: `start`, `metrics`, or another name in `specrl.tracking.sender.SENDERS`
    time_ms: int
    """When it was logged, in milliseconds since the epoch. A tracker gets this time, however late it gets the entry."""
    values: Mapping[str, Any]
    begin: int
    end: int  # the positions in bytes at which it begins and at which the next one does


class Log:
    """The entries of a run or a stage. One process appends and one process sends; they may be the same."""

    def __init__(self, folder: Path) -> None:
        """Open the log of a run's or a stage's folder, which need not exist yet."""
        self.owner = folder
        self.folder = folder / FOLDER
        self.path = self.folder / ENTRIES_FILE
        self._lock = threading.Lock()

    def append(self, kind: str, **values: Any) -> None:
        """Append an entry; an OSError where the disk does not take it."""
        line = json.dumps({"kind": kind, "time_ms": int(time.time() * 1000), **values}, default=str)
        with self._lock:
            append_line(self.path, line, flush=False)

    def entries(self, position: int = 0) -> Iterator[Entry]:
        """Yield the complete entries from a position on; a line that is no entry is skipped."""
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

    def first_tags(self) -> dict[str, str]:
        """The tags with which the run or the stage was first started; none before that."""
        return dict(next((entry.values["tags"] for entry in self.entries() if entry.kind == "start"), {}))

    def flush(self) -> None:
        """Flush the entries to disk: what is sent must be on disk, or the position would be beyond the end."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())


class Arrived(BaseModel):
    """What of a log a tracker has: all before a position, but for what is missing."""

    position: int = 0
    missing: dict[int, str] = {}
    """Where entries before the position begin that have not arrived, and why they were refused, if they were."""
    versions: dict[str, str] = {}  # the numbers of the registered model versions, by the models' names


class Sent:
    """The file of what of a log a tracker has. Each has a file of its own, as they send in processes of their own."""

    def __init__(self, log: Log, tracker: str = "mlflow") -> None:
        self.log, self._path = log, log.folder / f"sent-{tracker}.json"
        self.now = self._read()

    def refresh(self) -> None:
        """Read it again, as another process may have sent something since."""
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
        """Whether something was not sent yet, or could not be uploaded."""
        return "" in self.now.missing.values() or next(self.waiting(), None) is not None

    def note(self, entries: Sequence[Entry], reason: str | None = None) -> None:
        """Note that these entries have arrived, or else why not.

        While the disk is full, only this process knows it, and sends nothing twice; another process may.
        """
        self.now.position = max(self.now.position, entries[-1].end)
        for entry in entries:
            self.now.missing.pop(entry.begin, None)
            if reason is not None:
                self.now.missing[entry.begin] = reason
        with contextlib.suppress(OSError):
            write_text(self._path, self.now.model_dump_json())

    def forget(self) -> None:
        """Have everything sent again, to a run that is made anew."""
        self._path.unlink(missing_ok=True)
        self.now = Arrived()
