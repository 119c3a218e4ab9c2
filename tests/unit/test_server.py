"""How long Prefect's server is waited for."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from flows import server
from flows.server import PrefectServer, ServerError
from specrl.processes import free_port


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


def test_a_server_that_works_is_waited_for_longer_than_one_that_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0)
    assert "it has not answered for 0 s" in waited_for("import time; time.sleep(1000)", tmp_path, monkeypatch)
    monkeypatch.setattr(server, "IDLE_SECONDS", 10**6)
    monkeypatch.setattr(server, "START_SECONDS", 2)
    monkeypatch.setattr(server, "PATIENCE_SECONDS", 0)
    said = waited_for("while True: pass", tmp_path, monkeypatch)
    assert "it has not answered for 2 s, " in said and said.endswith(f"see {tmp_path / 'server.log'}")
    assert "Prefect's server is starting" in capsys.readouterr().err


def test_a_server_that_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = waited_for("raise SystemExit(7)", tmp_path, monkeypatch)
    assert "did not start: it ended with exit code 7; see " in said


def test_a_server_of_the_user_that_refuses_requests_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://127.0.0.1:9/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    refusal = httpx.Response(401, request=httpx.Request("GET", url))
    words = r"refuses .* \(Client error '401 .* without PREFECT_API_URL, "
    with pytest.raises(ServerError, match=words) as raised, PrefectServer(tmp_path):
        refusal.raise_for_status()
    assert "\n" not in str(raised.value)


def test_the_own_server_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as healthy:
        threading.Thread(target=healthy.handle_request).start()
        assert server._answers(f"http://127.0.0.1:{healthy.server_port}/api/health")


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
