"""What is to be sent to MLflow, on disk: entries that are appended, and the position up to which they have arrived.

A stage writes here and nowhere else, so that logging needs no server. A run and each of its stages have a spool of
their own, in the folder `tracking`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from specrl.artifacts import write_text

FOLDER = "tracking"
APPENDED = (".jsonl", ".log", ".out")
"""How the names of files end that lines are appended to."""
QUEUE, LATER, FILES_FOLDER = "spool", "artifacts", "files"
"""The entries in their order; the artifacts that could not be stored, which hold back nothing else; and their files."""
SENT_FILES = {QUEUE: "sent", LATER: "artifacts.sent"}
KEPT = re.compile(FILES_FOLDER + r"/[0-9a-f]{12}/[^/\0]+")
"""What `Spool.keep` and `Spool.new_file` name what they keep."""


@dataclass(frozen=True)
class Entry:
    """One thing to be sent."""

    kind: str
    """What it is: a name in `specrl.tracking.sender.SENDERS`."""
    time_ms: int
    """When it was logged, in milliseconds since the epoch. MLflow gets this time, however late it gets the entry."""
    values: Mapping[str, Any]
    end: int
    """The position in bytes at which the next entry begins."""


class Spool:
    """The entries of one MLflow run. One process appends and one process sends; they may be the same."""

    def __init__(self, folder: Path, queue: str = QUEUE) -> None:
        """Open the spool of a run's or a stage's folder, which need not exist yet."""
        self.owner = folder
        self.folder = folder / FOLDER
        self.path, self._sent_path = self.folder / f"{queue}.jsonl", self.folder / SENT_FILES[queue]
        self._lock = threading.Lock()
        self._repaired = False
        self._acknowledged = 0
        self._arrived: list[Entry] = []
        """What has arrived while the position could not be written, and whose files are still kept."""

    def append(self, kind: str, **values: Any) -> None:
        """Append an entry.

        Raises:
            OSError: The disk is full or away. The spool is as it was before.
        """
        line = json.dumps({"kind": kind, "time_ms": int(time.time() * 1000), **values}, default=str) + "\n"
        data = line.encode()
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                self._write(file, data)
            finally:
                os.close(file)

    def _write(self, file: int, data: bytes) -> None:
        size = os.fstat(file).st_size
        if not self._repaired and size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")  # ends the line that a killed process has left incomplete, which nobody will read
            size += 1
        self._repaired = True
        written = os.write(file, data)
        if written < len(data):
            os.ftruncate(file, size)
            raise OSError(f"only {written} of {len(data)} bytes were written")

    def began_ms(self) -> int:
        """Return when the first entry was logged, in milliseconds since the epoch."""
        first = next(self.everything(), None)
        return int(time.time() * 1000) if first is None else first.time_ms

    def keep(self, path: Path, name: str = "", without: str = "") -> str:
        """Keep a file or a folder as it is now, by hard links where the file system has them.

        Files of this project are replaced and never changed in place, so a link keeps the contents. Only those of
        `APPENDED` grow; they are copied.

        Args:
            name: The name under which it is kept; its own by default.
            without: The files of the folder to leave out, such as `*.safetensors`.

        Returns:
            The path of what is kept, below the folder of the spool.

        Raises:
            OSError: The disk is full, or there is no such file.
        """
        kept = f"{FILES_FOLDER}/{uuid.uuid4().hex[:12]}/{name or path.name}"
        target = self.folder / kept
        target.parent.mkdir(parents=True)
        if path.is_dir():
            shutil.copytree(path, target, copy_function=_link, ignore=shutil.ignore_patterns(without))
        else:
            _link(str(path), str(target))
        return kept

    def new_file(self, name: str) -> Path:
        """Return the path of a new file of this name in the spool, for the caller to write; `relative` names it."""
        path = self.folder / FILES_FOLDER / uuid.uuid4().hex[:12] / name
        path.parent.mkdir(parents=True)
        return path

    def relative(self, path: Path) -> str:
        """Return a path below the folder of the spool as entries name it."""
        return str(path.relative_to(self.folder))

    def kept(self, path: str) -> Path:
        """Return where what an entry names is kept.

        Raises:
            FileNotFoundError: The entry names nothing that `keep` or `new_file` has made, or it has been removed.
        """
        name = PurePosixPath(path)
        target = self.folder / name
        if not KEPT.fullmatch(path) or ".." in name.parts:
            raise FileNotFoundError(f"{path} is nothing that this spool keeps")
        links = [place for place in (*target.parents[: len(name.parts)], target) if place.is_symlink()]
        if links or (target.is_dir() and any(place.is_symlink() for place in target.rglob("*"))):
            raise FileNotFoundError(f"{target} leads elsewhere: there are no links in a spool")
        if not target.exists():
            raise FileNotFoundError(f"{target} has been removed")
        return target

    def _remove(self, path: str) -> None:
        """Remove what an entry that has arrived had kept, and nothing else."""
        with contextlib.suppress(FileNotFoundError):
            self.kept(path)
            shutil.rmtree(self.folder / FILES_FOLDER / PurePosixPath(path).parts[1], ignore_errors=True)

    def sync(self) -> None:
        """Flush the entries to disk: what is sent must be on disk, or the position would be beyond the end."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def position(self) -> int:
        """Return the position in bytes up to which everything has been sent."""
        try:
            noted = int(self._sent_path.read_text())
        except (FileNotFoundError, ValueError):
            noted = 0
        return max(noted, self._acknowledged)

    def acknowledge(self, entries: list[Entry], *, keep: bool = False) -> None:
        """Note that everything up to the last of these entries has arrived, and remove the files that they kept.

        With `keep` their files stay, for another queue.

        While the disk is full, only this process knows it, and sends nothing twice; another process may, and needs the
        files for it. They are removed once the position could be written.
        """
        self._acknowledged = entries[-1].end
        self._arrived += [] if keep else entries
        try:
            write_text(self._sent_path, str(self._acknowledged))
        except OSError:
            return
        arrived, self._arrived = self._arrived, []
        for entry in arrived:
            if "path" in entry.values:
                self._remove(str(entry.values["path"]))

    def rewind(self) -> None:
        """Have everything sent again, as to a run that is made anew; artifacts that have arrived are gone from here."""
        self._acknowledged = 0
        self._sent_path.unlink(missing_ok=True)

    def waiting(self) -> Iterator[Entry]:
        """Yield the complete entries after the position; a line that is no entry is skipped."""
        yield from self._entries(self.position())

    def everything(self) -> Iterator[Entry]:
        """Yield all complete entries from the first one on, sent or not."""
        yield from self._entries(0)

    def has_waiting(self) -> bool:
        """Return whether an entry has not been sent."""
        return next(self.waiting(), None) is not None

    def _entries(self, position: int) -> Iterator[Entry]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                position += len(line)
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    values = json.loads(line)
                    yield Entry(values.pop("kind"), values.pop("time_ms"), values, position)


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy where the file system has none or the file may grow."""
    if source.endswith(APPENDED):
        shutil.copy2(source, target)
        return
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copy2(source, target)
