"""A real MLflow server that can be stopped and started, and a proxy in front of it that plays a server in trouble."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.request import urlopen

from specrl.processes import LOOPBACK, free_port

Mode = Literal["pass", "error", "hang", "lose"]


class MlflowServer:
    """`mlflow server` on a sqlite file, at the same address each time that it is started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.uri = f"http://{LOOPBACK}:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", f"{self.folder}/store"]
        environment = {**os.environ, "DO_NOT_TRACK": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        process = subprocess.Popen(command, env=environment, cwd=self.folder, start_new_session=True)
        self.process = process
        deadline = time.monotonic() + 600  # its imports take a minute on a busy machine
        while time.monotonic() < deadline:
            try:
                urlopen(f"{self.uri}/health", timeout=10)
                return
            except OSError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.2)
        raise TimeoutError("the server does not answer")

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None


class Proxy:
    """Passes requests on, answers with an error or never, or passes on and loses the first answer from each path."""

    def __init__(self, port: int) -> None:
        self.mode: Mode = "pass"
        self.requests = 0
        """The number of requests since the mode was last set with `become`."""
        self._lost: set[str] = set()
        self._ended = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.requests += 1
                mode = proxy.mode
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if mode == "hang":
                    proxy._ended.wait(60)
                elif mode == "error":
                    self.send_error(500)
                else:
                    lose = mode == "lose" and self.path not in proxy._lost
                    proxy._lost.add(self.path)
                    self._pass_on(port, body, answer=not lose)

            def _pass_on(self, port: int, body: bytes, answer: bool) -> None:
                connection = http.client.HTTPConnection(LOOPBACK, port)
                headers = {name: value for name, value in self.headers.items() if name != "Connection"}
                connection.request(self.command, self.path, body, headers)
                response = connection.getresponse()
                content = response.read()
                connection.close()
                if answer:
                    self.send_response(response.status)
                    self.send_header("Content-Type", response.headers.get("Content-Type", "application/json"))
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, format: str, *arguments: object) -> None: ...

        for method in ("POST", "PUT", "PATCH", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.do_GET)
        self._server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self._server.daemon_threads = True
        self.uri = f"http://{LOOPBACK}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def become(self, mode: Mode) -> None:
        self.mode, self.requests = mode, 0
        self._lost.clear()

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
