"""The thread that sends a spool to MLflow, and waits as long as MLflow is away."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from textwrap import shorten

from filelock import FileLock, Timeout

from specrl.config import Config
from specrl.tracking.sender import Sender
from specrl.tracking.spool import LATER, Spool
from specrl.tracking.store import connect, tracking_uri

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""How often the thread looks for new entries."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 60.0
"""The pause after a failed attempt, which doubles with every further one."""
LAST_PAUSE_SECONDS = 2.0
"""The longest pause while someone waits for the end."""
REASON_LENGTH = 200
"""The number of characters of an error that a warning quotes."""
LOCK_FILE = ".sending.lock"


class Uploader:
    """Sends a spool from now on until `close`. It neither raises nor waits in the threads that log."""

    def __init__(self, config: Config, spool: Spool) -> None:
        self._config, self._spool = config, spool
        self._later = Spool(spool.owner, LATER)
        self._senders: dict[str, Sender] = {}
        self._later_at, self._later_pause = 0.0, FIRST_PAUSE_SECONDS
        """When what could not be stored is tried again, and the pause after that."""
        self._closing = threading.Event()
        self._stopping = threading.Event()
        self._failed_at: float | None = None
        """When MLflow was first found away; None while it answers."""
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self._thread.start()

    def close(self, patience_s: float, limit_s: float | None = None) -> bool:
        """Send what waits and end.

        Args:
            patience_s: For how long a store that is away is tried again.
            limit_s: How long a store that answers may take; by default as long as it needs.

        Returns:
            Whether everything has been sent. What has not is sent by the next one to open the spool.
        """
        closed_at = time.monotonic()
        self._closing.set()
        while self._thread.is_alive():
            self._thread.join(0.05)
            now = time.monotonic()
            if self._failed_at is not None and now - max(self._failed_at, closed_at) > patience_s:
                break
            if limit_s is not None and now - closed_at > limit_s:
                break
        self._stopping.set()  # the thread is a daemon: an attempt that hangs ends with the process
        return not (self._spool.has_waiting() or self._later.has_waiting())

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            last = self._closing.is_set()
            if self._attempt():
                pause = FIRST_PAUSE_SECONDS
                if last:
                    return
                self._closing.wait(IDLE_SECONDS)
                continue
            if last:
                self._stopping.wait(min(pause, LAST_PAUSE_SECONDS))
            else:
                self._closing.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _attempt(self) -> bool:
        """Send everything that waits; return whether that went well. The begin and the end of an outage are logged."""
        try:
            self._spool.folder.mkdir(parents=True, exist_ok=True)
            # Two senders of one spool would send everything twice: a job, and `specrl sync` at the same time.
            with FileLock(self._spool.folder / LOCK_FILE, timeout=0):
                self._send_all(self._spool)
                self._store_again()
        except Timeout:
            self._away(f"another process sends {self._spool.path}")
            return False
        except Exception as error:  # artifact stores raise errors of many libraries; none may end a training run
            self._away(str(error).partition("\n")[0])
            return False
        self._back()
        return True

    def _send_all(self, spool: Spool) -> None:
        if not spool.has_waiting():
            return
        name = spool.path.name
        if name not in self._senders:
            self._senders[name] = Sender(connect(self._config), self._config, spool)
        while self._senders[name].send_next():
            self._back()
            if self._stopping.is_set():
                return

    def _store_again(self) -> None:
        """Try the artifacts that could not be stored, less and less often; nothing else waits for them."""
        if time.monotonic() < self._later_at:
            return
        try:
            self._send_all(self._later)
        except Exception as error:  # as in `_attempt`
            logger.debug("%s: %s", self._later.path, error)
            self._later_at = time.monotonic() + self._later_pause
            self._later_pause = min(2 * self._later_pause, LONGEST_PAUSE_SECONDS)

    def _away(self, reason: str) -> None:
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            logger.warning(
                "MLflow at %s is away (%s): what is logged waits in %s and is sent later; nothing else is affected",
                tracking_uri(self._config),
                shorten(reason, REASON_LENGTH, placeholder=" ..."),
                self._spool.folder,
            )

    def _back(self) -> None:
        if self._failed_at is not None:
            logger.warning(
                "MLflow is back after %.0f s; what has waited is sent now", time.monotonic() - self._failed_at
            )
            self._failed_at = None


def send(config: Config, folders: list[Path], patience_s: float, limit_s: float | None = None) -> list[Path]:
    """Send the spools of a run and its stages, and return the folders of which something could not be sent.

    Args:
        folders: The folders of the run and of its stages, in the order in which their spools are sent.
        patience_s: For how long a store that is away is tried again.
        limit_s: How long a store that answers may take for one spool; by default as long as it needs.
    """
    waiting = [folder for folder in folders if Spool(folder).has_waiting() or Spool(folder, LATER).has_waiting()]
    unsent = []
    for number, folder in enumerate(waiting):
        if not Uploader(config, Spool(folder)).close(patience_s, limit_s):
            if Spool(folder).has_waiting():
                return unsent + waiting[number:]  # the others would wait for the same store
            unsent.append(folder)
    return unsent
