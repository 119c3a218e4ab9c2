"""What a flow does about a job that lasts too long or that cannot be cancelled, without a scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.folder import write_config
from slurm import watch
from slurm.backend import Failure, JobError, SilentSchedulerError, State
from slurm.slurm_backend import SlurmJob
from slurm.watch import wait
from specrl.config import Config, parse_config
from specrl.context import StageContext
from specrl.lifetime.segments import begin_segment, read_segments
from tasks.run import cancel_jobs

MINUTE = 60.0


class LongJob:
    """A job that runs without end, and is suspended for a part of that time."""

    backend, job_id, attached, ask_seconds = "slurm", "12", False, 5.0

    def __init__(self, suspended: range) -> None:
        self.now, self.suspended, self.cancelled = 0.0, suspended, False

    def clock(self) -> float:
        return self.now

    def state(self) -> State:
        return State("running", "", suspended=int(self.now / MINUTE) in self.suspended)

    def cancel(self) -> None:
        self.cancelled = True

    def log(self, rank: int) -> Path:
        return Path("log")

    def failure(self, ranks: int) -> Failure:
        return Failure(0)

    def pass_time(self, state: State, progress: object) -> None:
        self.now += MINUTE


@pytest.fixture
def config(tmp_path: Path) -> Config:
    more = {"resources": {"minutes": 5}, "cluster": {"backend": "slurm"}}
    return parse_config({"name": "demo", "runs_dir": str(tmp_path / "runs"), "model": {"source": "tiny"}, **more})


def context(config: Config) -> StageContext:
    stage_dir = config.run_dir / "stages" / "prepare-0"
    stage_dir.mkdir(parents=True)
    return StageContext(config, "prepare", "prepare-0", stage_dir, {}, "")


@pytest.mark.parametrize(("suspended", "minutes"), [(range(0), 16), (range(3, 603), 616)])
def test_time_in_which_a_job_is_suspended_is_no_running_time(
    config: Config, suspended: range, minutes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0)
    job = LongJob(suspended)
    with pytest.raises(JobError, match=r"ran far beyond resources.minutes = 5, and was cancelled"):
        wait(job, context(config), job.pass_time, job.clock)
    assert job.cancelled
    assert job.now / MINUTE == pytest.approx(minutes, abs=1)


@pytest.fixture
def scancel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command that says on standard error what is written into this file, and fails if that is anything."""
    folder, words = tmp_path / "bin", tmp_path / "words"
    folder.mkdir()
    (folder / "scancel").write_text(f"#!/bin/sh\ncat {words} >&2\n[ ! -s {words} ]\n")
    (folder / "squeue").write_text("#!/bin/sh\necho 12\n")
    for command in folder.iterdir():
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return words


def test_a_job_that_slurm_does_not_cancel_is_not_called_cancelled(config: Config, scancel: Path) -> None:
    stage_dir = context(config).stage_dir
    (config.run_dir / "jobs" / "prepare-0").mkdir(parents=True)
    write_config(config)
    begin_segment(stage_dir, "12", "host")
    scancel.write_text("scancel: error: Unable to contact slurm controller")
    said: list[str] = []
    cancel_jobs(config.run_dir, said.append)
    assert read_segments(stage_dir)[0].reason is None
    scancel.write_text("")
    cancel_jobs(config.run_dir, said.append)
    assert said == [
        "slurm job 12 could not be cancelled: scancel: Unable to contact slurm controller; run scancel 12",
        "cancelled slurm job 12",
    ]
    assert read_segments(stage_dir)[0].reason == "cancelled"


def test_a_job_that_has_ended_needs_no_cancelling(scancel: Path, tmp_path: Path) -> None:
    job = SlurmJob("12", tmp_path, attached=True)
    scancel.write_text("scancel: error: Kill job error on job id 12: Invalid job id specified")
    job.cancel()
    scancel.write_text("scancel: error: Unable to contact slurm controller")
    with pytest.raises(SilentSchedulerError, match="slurm job 12 could not be cancelled"):
        job.cancel()
