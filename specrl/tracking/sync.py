"""Send the logs of a run and its stages to MLflow: from the flow, `specrl sync`, and a thread of a stage.

A file `sent-TRACKER.json` beside each log records what has arrived, so that every call sends only what is missing. A
log that cannot be sent delays no other, and a file that cannot be uploaded delays no metric.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten

from filelock import FileLock, Timeout

from specrl.config import Config
from specrl.tracking.log import Entry, Log, Sent
from specrl.tracking.sender import BATCH_METRICS, MlflowSender, RefusedError
from specrl.tracking.store import connect, tracking_uri

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0  # between checks for new entries
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 60.0
"""The pause after a failed attempt; it doubles with every further one."""
LAST_PAUSE_SECONDS = 2.0  # the longest pause while a user waits for the end
REASON_LENGTH = 200  # characters of an error quoted in a warning
LOCK_FILE = ".sending.lock"
FILES = ("artifact", "model")
"""The kinds of entries that upload files, whose store may be unreachable although MLflow answers."""


class Syncing:
    """Sends a log in a thread until `close`; never raises or waits in the threads that log."""

    def __init__(self, config: Config, log: Log) -> None:
        self._config, self._sent = config, Sent(log)
        self._sender: MlflowSender | None = None
        self._retries = True
        """Whether entries refused earlier still have to be retried, which each `Syncing` does once."""
        self._store_is_away = False
        self._closing = threading.Event()
        self._stopping = threading.Event()
        self._failed_at: float | None = None
        """Since when MLflow has been unreachable; None while it answers."""
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self._thread.start()

    def close(self, patience_s: float, limit_s: float | None = None) -> bool:
        """Send what waits and end; return whether everything was sent. See `send` for the arguments."""
        closed_at = time.monotonic()
        self._closing.set()
        while self._thread.is_alive():
            self._thread.join(0.05)
            now = time.monotonic()
            is_away = self._failed_at is not None and now - max(self._failed_at, closed_at) > patience_s
            if is_away or (limit_s is not None and now - closed_at > limit_s):
                break
        self._stopping.set()  # a daemon thread: a hanging attempt ends with the process
        return not self._sent.waits()

    @property
    def is_away(self) -> bool:
        """Whether MLflow itself, and not only its artifact store, did not answer the last time."""
        return self._failed_at is not None and not self._store_is_away

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            last = self._closing.is_set()
            if self._attempt():
                if last:
                    return
                pause = FIRST_PAUSE_SECONDS
                self._closing.wait(IDLE_SECONDS)
            else:
                (self._stopping if last else self._closing).wait(min(pause, LAST_PAUSE_SECONDS) if last else pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _attempt(self) -> bool:
        folder = self._sent.log.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Concurrent senders of one log, such as a job and `specrl sync`, would send everything twice.
            with FileLock(folder / LOCK_FILE, timeout=0):
                self._send_all()
        except Timeout:
            self._away(f"another process sends {self._sent.log.path}")
            return False
        except Exception as error:  # artifact stores raise errors of many libraries; none may end a training
            self._away(str(error).partition("\n")[0])
            return False
        self._back()
        return True

    def _send_all(self) -> None:
        """Send what waits, in order, then files, which may go to another store, and retries.

        Raises:
            Exception: MLflow or its artifact store is unreachable, or MLflow refuses the start of the run.
        """
        self._sent.refresh()
        for entries in self._batches():
            if self._stopping.is_set():
                return
            if entries[0].kind in FILES:
                self._sent.note(entries, "")
            else:
                self._send(entries)
        for entry in self._sent.retried():
            if self._stopping.is_set():
                return
            if self._retries or not self._sent.now.missing[entry.begin]:
                self._store_is_away |= entry.kind in FILES  # until it has arrived
                self._send([entry])
        self._retries = self._store_is_away = False

    def _send(self, entries: Sequence[Entry]) -> None:
        self._sent.log.flush()
        self._sender = self._sender or MlflowSender(connect(self._config), self._config, self._sent)
        try:
            self._sender.send(entries)
        except RefusedError as error:
            if entries[0].kind == "start":  # nothing else can be sent without the run
                raise
            if len(entries) > 1:  # one of them is refused; do not lose the others
                for entry in entries:
                    self._send([entry])
            else:
                self._refused(entries, str(error))
        except FileNotFoundError as error:
            logger.warning("%s: an entry is left out: %s", self._sent.log.path, error)
            self._sent.note(entries)
        else:
            self._store_is_away = self._store_is_away and entries[0].kind not in FILES
            if not self._store_is_away:
                self._back()
            self._sent.note(entries)

    def _batches(self) -> Iterator[list[Entry]]:
        """Yield entries to send together: one entry, or consecutive metrics."""
        while first := next(self._sent.waiting(), None):
            batch: list[Entry] = []
            total = 0
            for entry in self._sent.waiting():
                total += len(entry.values["metrics"]) if entry.kind == "metrics" else 0
                if batch and (not entry.kind == first.kind == "metrics" or total > BATCH_METRICS):
                    break
                batch.append(entry)
            yield batch

    def _refused(self, entries: Sequence[Entry], reason: str) -> None:
        if not any(self._sent.now.missing.values()):
            logger.warning(
                "MLflow refuses what %s logs (%s); that is sent again by the next job, the flow, or specrl sync",
                self._sent.log.owner.name,
                reason,
            )
        self._sent.note(entries, reason)

    def _away(self, reason: str) -> None:
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            logger.warning(
                "%s at %s is away (%s): what is logged waits in %s and is sent later; nothing else is affected",
                "the artifact store of MLflow" if self._store_is_away else "MLflow",
                tracking_uri(self._config),
                shorten(reason, REASON_LENGTH, placeholder=" ..."),
                self._sent.log.folder,
            )

    def _back(self) -> None:
        if self._failed_at is not None:
            logger.warning(
                "MLflow is back after %.0f s; what has waited is sent now", time.monotonic() - self._failed_at
            )
            self._failed_at = None


def send(config: Config, folders: Sequence[Path], patience_s: float, limit_s: float | None = None) -> list[Path]:
    """Send the logs of these folders, in order; return the folders that still have unsent entries.

    Args:
        patience_s: How long an unreachable store is retried, for all folders together.
        limit_s: How long a reachable store may take for one folder; unlimited by default.
    """
    waiting = [folder for folder in folders if not Sent(Log(folder)).is_complete()]
    late: list[Path] = []
    for number, folder in enumerate(waiting):
        syncing = Syncing(config, Log(folder))
        syncing.close(0.0 if late else patience_s, limit_s)  # all files go to the same store
        if syncing.is_away:
            return [*late, *waiting[number:]]  # the others would wait for the same store
        late += [folder] if Sent(Log(folder)).waits() else []
    return late
