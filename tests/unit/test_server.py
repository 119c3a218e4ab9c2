"""How long Prefect's server is waited for."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from flows import server
from flows.preflight import DRY_CHECKS, check_prefect
from flows.server import PrefectServer, ServerError
from specrl.config import Config
from specrl.processes import free_port, reach_loopback


def waited_for(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of a wait for a server that is this program, and answers nobody."""
    monkeypatch.setenv("PREFECT_HOME", str(folder))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    found = PrefectServer(folder)
    found.url = f"http://127.0.0.1:{free_port()}/api"
    found.process = subprocess.Popen([sys.executable, "-c", program])
    try:
        with pytest.raises(ServerError) as raised:
            found.wait()
    finally:
        found.process.kill()
        found.process.wait()
    return str(raised.value)


def test_a_server_that_does_not_answer_is_waited_for_and_given_up_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "START_SECONDS", 2)
    monkeypatch.setattr(server, "PATIENCE_SECONDS", 0)
    said = waited_for("while True: pass", tmp_path, monkeypatch)
    assert "it has not answered for 2 s; " in said and said.endswith(f"see {tmp_path / 'server.log'}")
    assert "Prefect's server is starting" in capsys.readouterr().err


def test_a_server_that_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server.log").write_text("Traceback ...\nOperationalError: no such database\n")
    said = waited_for("raise SystemExit(7)", tmp_path, monkeypatch)
    assert "did not start: it ended with exit code 7 (OperationalError: no such database); see " in said


def test_threads_of_prefect_that_lose_their_server_say_nothing_beside_the_commands_own_line() -> None:
    program = "import logging; from flows.server import quieten; quieten(); from prefect.logging import configuration; "
    program += "configuration.setup_logging(); "
    program += "print(logging.getLogger('prefect._internal.concurrency').isEnabledFor(logging.ERROR))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_server_of_the_user_that_refuses_requests_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://127.0.0.1:9/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    refusal = httpx.Response(401, request=httpx.Request("GET", url))
    words = r"refuses .* \(Client error '401 .* without it, "
    with pytest.raises(ServerError, match=words) as raised, PrefectServer(tmp_path):
        refusal.raise_for_status()
    assert "\n" not in str(raised.value)


def test_a_server_of_the_user_that_does_not_answer_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port()}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    words = rf"no Prefect server answers at {url} \(.*\); PREFECT_API_URL is the address of"
    with pytest.raises(ServerError, match=words), PrefectServer(tmp_path) as found:
        found.wait()


def test_the_own_server_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    reach_loopback()  # as a `PrefectServer` does
    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as healthy:
        threading.Thread(target=healthy.handle_request).start()
        assert server.silence_of(f"http://127.0.0.1:{healthy.server_port}/api") is None


def test_a_dry_run_asks_the_users_own_server_and_takes_any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as refusing:  # 501
        threading.Thread(target=refusing.handle_request).start()
        url = f"http://127.0.0.1:{refusing.server_port}/api"
        assert server.silence_of(url) is None
    monkeypatch.setenv("PREFECT_API_URL", url)
    (line,) = check_prefect(Config(name="run"))
    assert line.startswith(f"PREFECT_API_URL = {url}: no Prefect server answers there (")
    assert check_prefect in DRY_CHECKS
    monkeypatch.setenv("PREFECT_API_URL", "prefect.example/api")
    assert "unknown url type" in "".join(check_prefect(Config(name="run")))
    monkeypatch.delenv("PREFECT_API_URL")
    assert check_prefect(Config(name="run")) == []


def test_a_page_in_place_of_prefects_api_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{pages.server_port}"
        program = (
            f"from pathlib import Path; from flows import server; server.mark_crashed_flows(Path({str(tmp_path)!r}))"
        )
        environment = {**os.environ, "PREFECT_API_URL": url, "PREFECT_HOME": str(tmp_path)}  # Prefect reads it once
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        pages.shutdown()
    assert f"ServerError: PREFECT_API_URL = {url}: what answers there is no API of Prefect; " in done.stderr


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>Prefect</title>")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def test_a_server_may_write_what_it_has_queued_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    wait = "import signal, sys, time; signal.signal(signal.SIGTERM, {}); print(flush=True); time.sleep(1000)"
    for handler, seconds, status in (("lambda *_: sys.exit(7)", 60, 7), ("signal.SIG_IGN", 0.1, -signal.SIGKILL)):
        monkeypatch.setattr(server, "END_SECONDS", seconds)
        monkeypatch.delenv("PREFECT_API_URL", raising=False)
        found = PrefectServer(tmp_path)
        for name in ("PREFECT_API_URL", server.PASSWORD):
            monkeypatch.setenv(name, "x")
        command = [sys.executable, "-c", wait.format(handler)]
        found.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert found.process.stdout is not None and found.process.stdout.readline()
        found.__exit__(None, None, None)
        assert found.process.returncode == status


def test_the_server_makes_private_files_of_its_own_whatever_the_command_was_called_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "prefect.toml").write_text('[server.database]\nconnection_url = "sqlite:////none/of.db"\n')
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql+asyncpg://team@127.0.0.1:9/prefect")
    for name in ("PREFECT_API_URL", server.PASSWORD):
        monkeypatch.delenv(name, raising=False)
    os.umask(0o022)
    with PrefectServer(tmp_path) as found:
        found.wait()
        assert found.process is not None
        status = Path(f"/proc/{found.process.pid}/status").read_text()
    assert "Umask:\t0077\n" in status
    assert (tmp_path / "prefect.db").stat().st_mode & 0o077 == 0
