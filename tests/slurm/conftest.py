from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.folder import write_config
from flows.server import PrefectServer
from specrl.config import Config, parse_config
from tests.slurm.dummy_stage import release

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """One Prefect server for all flows of the session."""
    with PrefectServer(tmp_path_factory.mktemp("prefect")) as running:
        running.wait()
        yield running


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Config]:
    """Write the folder of a run with two ranks: on one node here, on two nodes of the cluster."""

    def make(backend: str, **resources: int) -> Config:
        ranks = {"ranks_per_node": 2} if backend == "local" else {"nodes": 2}
        config = parse_config(
            {
                "name": "dummy",
                "runs_dir": str(tmp_path / "runs"),
                "model": {"source": "tiny"},
                "resources": {**ranks, "cpus_per_rank": 1, "memory_gib_per_rank": 0.5, "minutes": 5, **resources},
                "cluster": {"backend": backend, "ask_seconds": 2},
            }
        )
        write_config(config)
        return config

    return make


class FlowProcess:
    """The flow of `dummy_flow.py` in a process of its own, which tests may kill."""

    def __init__(self, config: Config, environment: dict[str, str]) -> None:
        self.config = config
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.slurm.dummy_flow", str(config.run_dir)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, pattern: str, seconds: float = 300) -> Path:
        """Until a file matching `pattern` lies in the run's folder."""
        deadline = time.monotonic() + seconds
        while not (found := list(self.config.run_dir.glob(pattern))):
            assert self.process.poll() is None, f"the flow ended: {self.finish()}"
            assert time.monotonic() < deadline, f"no {pattern} after {seconds} s"
            time.sleep(0.02)
        return found[0]

    def attach(self, stage: str) -> str:
        """What it printed until it ended, after it has found a job of a stage that is held until then."""
        lines = []
        while "attached to" not in (line := self.process.stdout.readline()):  # type: ignore[union-attr]
            assert line, "".join(lines) + self.finish()
            lines.append(line)
        release(self.config.run_dir, stage)
        return "".join([*lines, line]) + self.finish()

    def kill(self, number: signal.Signals) -> str:
        self.process.send_signal(number)
        return self.finish()

    def finish(self, seconds: float = 600) -> str:
        """What it printed, both streams."""
        output, errors = self.process.communicate(timeout=seconds)
        return output + errors


@pytest.fixture
def start_flow(server: PrefectServer) -> Iterator[Callable[..., FlowProcess]]:
    started: list[FlowProcess] = []

    def start(config: Config, **environment: str) -> FlowProcess:
        started.append(FlowProcess(config, environment))
        return started[-1]

    yield start
    for flow in started:
        if flow.process.poll() is None:
            flow.process.kill()
            flow.process.communicate()
