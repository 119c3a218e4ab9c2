"""Prefect without login or network: its state in the runs folder, its server on loopback for as long as a run lasts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock

from specrl.processes import end_with_parent, free_port

START_SECONDS = 180
QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_CLI_PROMPT": "false",
    "DO_NOT_TRACK": "true",
}
"""Errors are printed by the command line, once; whoever wants Prefect's own words sets PREFECT_LOGGING_LEVEL."""


class ServerError(RuntimeError):
    """Prefect's server did not start; one line that names its log."""


class PrefectServer:
    """`with PrefectServer(runs_dir) as server: ...; server.wait(); from flows.pipeline import pipeline`.

    Starting takes 6 s, and 20 the first time, when it makes its database: begin early, wait late. Nothing is started
    when the user has a server (`PREFECT_API_URL`). Prefect reads the environment when it is imported: import it after
    `wait`. The server ends with this process, even when this process is killed.
    """

    def __init__(self, runs_dir: Path) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("PREFECT_HOME", str(runs_dir.absolute() / ".prefect"))
        self.home = Path(os.environ["PREFECT_HOME"])
        # Two servers that create the same database at the same time would break it.
        self._lock = FileLock(self.home / "start.lock")
        self.process: subprocess.Popen[bytes] | None = None
        self.url = os.environ.get("PREFECT_API_URL", "")

    @property
    def log(self) -> Path:
        return self.home / "server.log"

    def __enter__(self) -> Self:
        if self.url:
            return self
        self.home.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        port = free_port()
        self.url = os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
        environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.server", str(port), str(os.getpid())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the flow, which needs the server to say that it was cancelled
            )
        return self

    def wait(self) -> None:
        """Return when the server answers.

        Raises:
            ServerError: it ended or does not answer.
        """
        if self.process is None:
            return
        deadline = time.monotonic() + START_SECONDS
        while not _answers(f"{self.url}/health"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"Prefect's server did not start; see {self.log}")
            time.sleep(0.1)
        self._lock.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is None:
            return
        self._lock.release()
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        del os.environ["PREFECT_API_URL"]


def serve(port: int, parent: int) -> None:
    """Serve Prefect's API on loopback until the parent process ends, however it ends."""
    import uvicorn

    end_with_parent(parent, signal.SIGTERM)
    application = "prefect.server.api.server:create_app"
    uvicorn.run(application, factory=True, host="127.0.0.1", port=port, log_level="error", lifespan="on")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
