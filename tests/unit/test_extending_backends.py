"""The recipe of CONTRIBUTING.md for a scheduler, run as it stands on the page."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.cli import invoke
from flows.folder import anchor
from flows.preflight import check_cluster
from slurm.backend import Job, JobError, State
from slurm.environment import snapshot_code
from slurm.submit import BACKENDS, attach_or_submit, backend_of, live_jobs
from slurm.watch import wait
from specrl.config import ClusterConfig, load_config
from specrl.context import StageContext
from tests.contributing import write_files

ROOT = Path(__file__).parents[2]
ENTRY = "tests.slurm.dummy_stage:main"


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the recipe where a user would write it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the dummy stage
    write_files("A scheduler", tmp_path)
    yield
    sys.modules.pop("my_scheduler", None)


@pytest.fixture
def context(tmp_path: Path) -> Iterator[StageContext]:
    """A stage of the recipe's configuration; its job, should it still run at the end of the test, is cancelled."""
    config = anchor(load_config(Path("scheduler.toml"), ["resources.minutes=5"]))
    made = StageContext(config, "prepare", "prepare-0", config.run_dir / "stages" / "prepare-0", {}, "")
    yield made
    for job in live_jobs(config).values():
        job.cancel()


def submit(context: StageContext) -> Job:
    job = attach_or_submit(context, ENTRY, snapshot_code(context.run_dir))
    assert job is not None
    return job


def ignore(state: State, progress: object) -> None:
    return


def test_a_job_is_submitted_and_waited_for_until_its_result_is_there(context: StageContext) -> None:
    job = submit(context)
    assert (job.backend, job.attached) == ("my_scheduler", False)
    wait(job, context, ignore)
    result = json.loads((context.stage_dir / "result.json").read_text())
    assert (result["ranks"], result["threads"], result["code"]) == ([0], "2", str(snapshot_code(context.run_dir)))
    assert attach_or_submit(context, ENTRY, snapshot_code(context.run_dir)) is None


def test_a_running_job_is_attached_to_and_cancelled(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "hold")
    job = submit(context)
    assert job.state().phase == "running"
    again = submit(context)
    assert (again.job_id, again.attached) == (job.job_id, True)
    assert [found.job_id for found in live_jobs(context.config).values()] == [job.job_id]
    again.cancel()
    deadline = time.monotonic() + 120
    while live_jobs(context.config):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert job.state().failed


def test_a_failed_job_is_one_line_with_its_error_and_log(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "fail")
    job = submit(context)
    with pytest.raises(JobError) as failed:
        wait(job, context, ignore)
    assert str(failed.value) == (
        f"prepare failed (my_scheduler job {job.job_id}, exit code 1): ValueError: the stage went wrong, in two lines "
        "(rank 0); log: runs/scheduled/jobs/prepare-0/log"
    )


def test_the_dry_run_and_the_checks_before_a_run_know_the_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "scheduler.toml", "--dry-run"]) == 0
    assert "this machine" in capsys.readouterr().out
    config = load_config(Path("scheduler.toml"), ["resources.ranks_per_node=2"])
    assert check_cluster(config) == ["--cluster my_scheduler: runs one rank, resources ask for 2"]


def test_a_row_in_the_table_gives_it_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    scheduler = importlib.import_module("my_scheduler").MyScheduler()
    monkeypatch.setitem(BACKENDS, scheduler.name, scheduler)
    assert backend_of(ClusterConfig(backend="my_scheduler")) is scheduler
