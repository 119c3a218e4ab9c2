"""What the commands and their servers write is private, whatever the umask of the shell they are called from."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.environment import ROOT
from specrl.processes import free_port

SMOKE = ROOT / "configs" / "smoke.toml"
Start = Callable[..., None]
SECONDS = 300


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Call `specrl` with an open umask, and wait until a file is there."""
    started: list[subprocess.Popen[bytes]] = []

    def call(umask: int, awaited: Path, *arguments: str) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))
        }
        with (tmp_path / "said").open("wb") as said:
            command = [sys.executable, "-m", "flows.cli", *arguments]
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said, umask=umask)
        started.append(process)
        deadline = time.monotonic() + SECONDS
        while not (awaited.exists() and awaited.stat().st_size):
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    yield call
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def modes(folder: Path) -> dict[str, int]:
    """The modes of a folder and of all below it."""
    found = {".": folder} | {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: stat.S_IMODE(path.lstat().st_mode) for name, path in found.items()}


@pytest.mark.parametrize("umask", [0, 0o022])
def test_the_pages_of_mlflow_make_private_files(umask: int, start: Start, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o700)
    start(umask, runs / "mlflow.db", "ui", "--runs-dir", str(runs), "--port", str(free_port()))
    found = modes(runs)
    assert found["mlflow.db"] == 0o600
    assert not [name for name, mode in found.items() if mode & 0o077]


@pytest.mark.parametrize("umask", [0, 0o022])
def test_a_schedule_makes_private_files(umask: int, start: Start, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    start(umask, runs / ".prefect" / "prefect.db", "serve", str(SMOKE), "--cron", "0 3 1 1 *", f"--set=runs_dir={runs}")
    found = modes(runs)
    assert found[".prefect"] == 0o700
    assert found[".prefect/prefect.db"] == 0o600
    assert not [name for name, mode in found.items() if mode & 0o077]


def test_a_schedule_for_a_group_keeps_its_server_private(start: Start, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    settings = [f"--set=runs_dir={runs}", "--set=cluster.access=group"]
    start(0, runs / ".prefect" / "prefect.db", "serve", str(SMOKE), "--cron", "0 3 1 1 *", *settings)
    found = modes(runs)
    assert found["."] == 0o750
    assert found[".prefect"] == 0o700
    assert found[".prefect/prefect.db"] == 0o600
