"""Runs Prefect without login or network, with its state in the runs folder and a server on the loopback interface."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPException
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self
from urllib.error import HTTPError
from urllib.request import urlopen

from filelock import FileLock

from slurm.access import PRIVATE
from specrl.checks.file_systems import prefect_home
from specrl.processes import end_helper, end_with_parent, free_port, last_line, reach_loopback, start_helper

START_SECONDS = 600  # for an answer: under heavy load, or from a slow disk, imports take minutes
PATIENCE_SECONDS = 20  # until the wait is explained
END_SECONDS = 5  # to end, before it is killed
QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_CLI_PROMPT": "false",
    "DO_NOT_TRACK": "true",
}
"""Defaults that silence Prefect, since `specrl` prints errors itself. PREFECT_LOGGING_LEVEL turns it up."""
PASSWORD, USER = "PREFECT_API_AUTH_STRING", "specrl"
"""The variable from which Prefect's clients read user and password, and that user."""
OWN_URL = "PREFECT_API_URL is the address of a server's API, which mostly ends in /api"
OF_SERVERS = ("PREFECT_API_", "PREFECT_SERVER_", "PREFECT_MESSAGING_")  # prefixes of the variables of servers


class ServerError(RuntimeError):
    """Prefect's server did not start, ended, or does not answer. The message is one line."""


def quieten() -> None:
    """Silence Prefect in this process and its children. Call this before Prefect is imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    reach_loopback()


class PrefectServer:
    """A context manager for a command's Prefect server; with `PREFECT_API_URL`, the user's own is used.

    Starting takes 6 s, and 20 s the first time, when the database is created: enter early, and `wait` late. Clients
    need the password of this start, which lies in the environment, where only processes of the same user can read it.
    Prefect reads the environment when it is imported, so import it after `wait`. The server ends with this process,
    even when this process is killed.
    """

    def __init__(self, runs_dir: Path) -> None:
        quieten()
        self.home = Path(os.environ.setdefault("PREFECT_HOME", str(prefect_home(runs_dir)))).expanduser().absolute()
        self.log = self.home / "server.log"
        # Two servers that create the same database at once would break it.
        self._lock = FileLock(self.home / "start.lock")
        self.process: subprocess.Popen[bytes] | None = None
        self.url = os.environ.get("PREFECT_API_URL", "")

    def __enter__(self) -> Self:
        if self.url:
            return self
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock.acquire()
        port = free_port()
        self.url = os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
        # Other users of this machine can reach the loopback interface, but do not know the password.
        password = os.environ[PASSWORD] = f"{USER}:{secrets.token_urlsafe()}"
        # Settings for another server, such as its database, must not affect this one.
        environment = QUIET | {key: value for key, value in os.environ.items() if not key.startswith(OF_SERVERS)}
        environment["PREFECT_HOME"] = str(self.home)
        environment[f"PREFECT_SERVER_{PASSWORD.removeprefix('PREFECT_')}"] = password
        with self.log.open("a") as log:
            self.process, _ = start_helper("flows.server", environment, log, send=[port])
        return self

    def wait(self) -> None:
        """Wait until the server answers; a ServerError if it has ended or does not answer for long."""
        if self.process is None:
            if (why := silence_of(self.url)) is not None:
                raise ServerError(f"no Prefect server answers at {self.url} ({why}); {OWN_URL}")
            return
        started, is_said = time.monotonic(), False
        while silence_of(self.url) is not None:
            if (code := self.process.poll()) is not None:
                ended = f"it ended with exit code {code} ({last_line(self.log)})"
                raise ServerError(f"Prefect's server did not start: {ended}; see {self.log}")
            seconds = time.monotonic() - started
            if seconds > START_SECONDS:
                raise ServerError(
                    f"Prefect's server did not start: it has not answered for {seconds:.0f} s; see {self.log}"
                )
            if not is_said and seconds > PATIENCE_SECONDS:
                is_said = True
                print("Prefect's server is starting; under heavy load it takes minutes", file=sys.stderr)
            time.sleep(0.1)
        self._lock.release()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.process is not None:
            self._lock.release()
            self.process.terminate()  # time to write what its recorders have queued
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
            end_helper(self.process)
            del os.environ["PREFECT_API_URL"], os.environ[PASSWORD]
        from httpx import HTTPError, TransportError  # by Prefect's client, which is slow to import

        if isinstance(error, HTTPError):
            fails = "does not answer any more" if isinstance(error, TransportError) else "refuses what it is asked"
            own = "" if self.process else f"; {OWN_URL}; without it, specrl starts a server of its own"
            raise ServerError(
                f"Prefect's server at {self.url} {fails} ({str(error).partition(chr(10))[0]}); what was submitted goes "
                f"on, and specrl resume RUN finds it{own}"
            ) from error


@contextlib.contextmanager
def explain_web_page() -> Iterator[None]:
    """Turn the error of a client that received a web page into a ServerError."""
    from prefect.settings import PREFECT_API_URL

    try:
        yield
    except json.JSONDecodeError as error:
        url = PREFECT_API_URL.value()
        raise ServerError(f"PREFECT_API_URL = {url}: what answers there is no API of Prefect; {OWN_URL}") from error


def mark_crashed_flows(run_dir: Path) -> None:
    """Mark flows and tasks that Prefect believes to be running in this folder as crashed; requires its lock.

    Prefect would show those with a killed process as running for ever.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import State
    from prefect.states import Crashed

    running = {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}, "name": None}}
    flows = filters.FlowRunFilter.model_validate({"name": {"any_": [str(run_dir)]}, **running})
    tasks = filters.TaskRunFilter.model_validate(running)
    crashed: State[None] = Crashed(message="its process was killed")
    with explain_web_page(), get_client(sync_client=True) as client:
        for task in client.read_task_runs(flow_run_filter=flows, task_run_filter=tasks):
            client.set_task_run_state(task.id, crashed, force=True)
        for flow in client.read_flow_runs(flow_run_filter=flows):
            client.set_flow_run_state(flow.id, crashed, force=True)


def main(command: Connection) -> None:
    """Serve Prefect's API on the loopback interface until the command's process ends in any way."""
    import uvicorn

    end_with_parent(command.recv(), signal.SIGTERM)
    os.umask(PRIVATE)  # its database holds the configurations of all runs, even if others may read this one
    port = command.recv()
    os.chdir(os.environ["PREFECT_HOME"])  # the user's folder may have a prefect.toml, or a .env, for another server
    application = "prefect.server.api.server:create_app"
    uvicorn.run(application, factory=True, host="127.0.0.1", port=port, log_level="error", lifespan="on")


def silence_of(url: str) -> str | None:
    """Why no server answers at this address of an API; None if one does, were it with a refusal."""
    try:
        with urlopen(f"{url.rstrip('/')}/health", timeout=10):
            return None
    except HTTPError:
        return None
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        return None if isinstance(reason, ssl.SSLError) else str(reason)  # Prefect's client may know the certificate
