"""A benchmark's cells on a real Slurm: what is measured stays, whatever becomes of the flow and of the other cells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.server import PrefectServer
from tests.slurm.conftest import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("devcluster", "server")]


def start(runs_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.slurm.dummy_sweep", str(runs_dir)],
        cwd=ROOT,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_killed_sweep_goes_on_and_a_failed_cell_loses_no_other(tmp_path: Path, server: PrefectServer) -> None:
    first = start(tmp_path)
    deadline, cells = time.monotonic() + 600, tmp_path / "bench-dummy" / "bench" / "cells"
    while len(list(cells.glob("jobs/*/context.json"))) < 3:  # the last of the three has been submitted
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[0]
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    said = first.communicate()[0]
    assert "missing: bench failed (slurm job " in said and "no configuration file at configs/missing.toml" in said
    second = start(tmp_path)
    output = second.communicate(timeout=600)[0]
    assert second.returncode == 0, output
    assert "outcome 8b: cached" in output
    assert output.count("submitted slurm job") == 1 and "missing    submitted slurm job" in output
    assert "outcome missing: bench failed (slurm job " in output
    started = {path.parent.name: path for path in cells.glob("stages/*/segments.jsonl")}
    assert len(started) == 3
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("specrl-bench")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {
        "missing": "FAILED",
        "8b": "FINISHED",
        "32b": "FINISHED",
    }
    for name in ("8b", "32b"):
        assert runs[name].data.params["config"] == name and runs[name].data.params["benchmark"] == "projection"
        assert any(metric.startswith("bench/") for metric in runs[name].data.metrics)
        files = {file.path for file in client.list_artifacts(runs[name].info.run_id)}
        assert {"page.md", "rows.json", "rows.arrow"} <= files
    assert "no configuration file" in runs["missing"].data.tags["specrl.error"]
