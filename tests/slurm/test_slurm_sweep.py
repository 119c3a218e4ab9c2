"""`specrl bench run` on a real Slurm: what is measured stays, whatever becomes of the command and of other cells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.integration.finished_run import write_finished_run
from tests.slurm.conftest import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("devcluster", "server")]
CELLS = (
    "plain: speculation.method=none, speculation.k=0",
    "missing: engine.kv_cache_gib=100000",  # which no node has, as its job finds out
    "one: speculation.k=1",
    "two: speculation.k=2",
)


def start(run_dir: Path) -> subprocess.Popen[str]:
    settings = ["train.prompts_per_step=4", "train.samples_per_prompt=2", "sampling.max_response_tokens=16"]
    settings += ["stage_resources.train.cpus_per_rank=1"]
    settings += [f"stage_resources.bench.{one}" for one in ("cpus_per_rank=1", "memory_gib_per_rank=4", "minutes=20")]
    options = ["--run", str(run_dir), "--cluster", "slurm", "--at-once", "1", "--steps", "1", "--warm-up", "0"]
    options += [word for cell in CELLS for word in ("--cell", cell)]
    options += [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "bench", "run", *options],
        cwd=ROOT,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_killed_sweep_goes_on_and_a_failed_cell_loses_no_other(tmp_path: Path) -> None:
    run_dir = write_finished_run(tmp_path)
    first = start(run_dir)
    deadline, cells = time.monotonic() + 900, run_dir / "bench" / "cells"
    while len(list(cells.glob("jobs/*.json"))) < 3:  # the last of the three has been submitted
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[0]
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    said = first.communicate()[0]
    assert "missing: bench failed (slurm job " in said and "trainings at once need" in said
    second = start(run_dir)
    output = second.communicate(timeout=900)[0]
    assert second.returncode != 0 and "1 of 3 jobs of bench run failed: missing: bench failed (slurm job " in output
    assert "one        finished before" in output
    assert output.count("submitted slurm job") == 1 and "missing    submitted slurm job" in output
    started = {path.parent.name: path for path in cells.glob("stages/*/segments.jsonl")}
    assert len(started) == 3
    page = (run_dir / "bench" / "run.md").read_text()
    assert "| one |" in page and "| two |" in page and "- missing: bench failed" in page
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("specrl-bench")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {
        "missing": "FAILED",
        "one": "FINISHED",
        "two": "FINISHED",
    }
    for name in ("one", "two"):
        assert runs[name].data.params["cell"] == name and runs[name].data.params["benchmark"] == "run"
        assert any(metric.startswith("bench/") for metric in runs[name].data.metrics)
        files = {file.path for file in client.list_artifacts(runs[name].info.run_id)}
        assert {"page.md", "page.json"} <= files
    assert "trainings at once need" in runs["missing"].data.tags["specrl.error"]
