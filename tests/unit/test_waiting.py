"""What a flow does about a job that lasts too long or that cannot be cancelled, without a scheduler."""

from __future__ import annotations

import errno
import os
import pty
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from flows import execute, server
from flows.cli import invoke
from flows.folder import write_config
from slurm import watch
from slurm.backend import (
    STOP_FILE,
    Failure,
    JobError,
    JobKey,
    Record,
    SilentSchedulerError,
    StageRequest,
    State,
    StoppedError,
    UnseenError,
    stop_asked,
)
from slurm.failures import explain
from slurm.local import LocalJob
from slurm.slurm_backend import SlurmJob
from slurm.watch import wait
from specrl.artifacts import RESULT_FILE, write_json
from specrl.config import Config, parse_config
from specrl.context import StageContext
from specrl.events import record_event
from specrl.lifetime.segments import begin_segment, end_segment, read_segments
from tasks.display import Reporter, make_reporter
from tasks.run import Run, begin, end_jobs, run_stage, work

MINUTE = 60.0


class LongJob:
    """A job that runs without end."""

    backend, job_id, attached, ask_seconds = "slurm", "12", False, 5.0

    def __init__(self) -> None:
        self.now, self.cancelled = 0.0, False

    def clock(self) -> float:
        return self.now

    def state(self) -> State:
        return State("running", "")

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


def test_a_job_that_runs_far_beyond_its_time_is_cancelled(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0)
    job = LongJob()
    with pytest.raises(JobError, match=r"ran far beyond resources.minutes = 5, and was cancelled"):
        wait(job, context(config), job.pass_time, job.clock)
    assert job.cancelled
    assert job.now / MINUTE == pytest.approx(16, abs=1)


class ExtendedJob(LongJob):
    """A job to which somebody has given an hour more, with `scontrol update`, and which then takes a minute to end."""

    def state(self) -> State:
        minute = int(self.now / MINUTE)
        if minute > 66:
            return State("ended", "COMPLETED", failed=True, reason="walltime")
        return State("running", "", in_time=minute < 65, is_leaving=minute >= 65)


def test_a_job_that_was_given_more_time_is_left_alone(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0)
    job = ExtendedJob()
    assert not wait(job, context(config), job.pass_time, job.clock)  # another job follows
    assert job.now / MINUTE == pytest.approx(67, abs=1)
    assert not job.cancelled


class LeavingJob(LongJob):
    """A job of which a process never ends."""

    def state(self) -> State:
        return State("running", "COMPLETING", is_leaving=self.now > 3 * MINUTE, in_time=self.now <= 3 * MINUTE)


def test_a_job_that_does_not_get_done_with_ending_is_cancelled_as_such(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0)
    job = LeavingJob()
    with pytest.raises(JobError, match="has been ending for more than 60 minutes, and was cancelled"):
        wait(job, context(config), job.pass_time, job.clock)
    assert job.now / MINUTE == pytest.approx(65, abs=1)


class Waiting(LongJob):
    """A job that Slurm never starts, as squeue of Slurm itself says it; `programs` has one in its place."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.slurm = SlurmJob(self.job_id, folder, attached=False)

    def state(self) -> State:
        return self.slurm.state()


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            "DependencyNeverSatisfied",
            r"can never start \(PENDING, DependencyNeverSatisfied: a job that it depends on has not ended as asked\)",
        ),
        *(
            (reason, r"can never start \(PENDING, \w+: it asks for more than a job of its account or QOS may have\)")
            for reason in ("AssocMaxWallDurationPerJobLimit", "QOSMaxGRESPerJob", "QOSMaxMemoryPerNode")
        ),
        ("QOSMinCpuNotSatisfied", r"can never start \(PENDING, \w+: it asks for less than a job of its QOS must have"),
        ("PartitionTimeLimit", r"can never start \(.*: resources\.minutes is more than its partition allows\)"),
        ("PartitionTimeLimit,short", r"waited in the queue for longer than cluster\.queue_minutes = 3"),
        ("AssocGrpCpuLimit", r"waited in the queue for longer than cluster\.queue_minutes = 3"),
        ("JobHeldUser", r"waited in the queue for longer than cluster\.queue_minutes = 3"),
    ],
)
def test_a_job_that_slurm_will_never_start_is_not_waited_for_as_one_that_somebody_holds_is(
    reason: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PATH", f"{tmp_path}:/usr/bin:/bin"), ("SLURM_TMPDIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(watch, "POLL_SECONDS", 0)
    reason, comma, other = reason.partition(",")
    answers = f'*%P*) echo "long{comma}{other}";; *) echo "12|PENDING|{reason}|prepare-0";;'
    (tmp_path / "squeue").write_text(f'#!/bin/sh\ncase "$*" in {answers} esac\n')
    (tmp_path / "squeue").chmod(0o755)
    cluster = {"backend": "slurm", "queue_minutes": 3, "sbatch": {"dependency": "afterok:7"}}
    config = parse_config({"name": "demo", "runs_dir": str(tmp_path), "model": {"source": "tiny"}, "cluster": cluster})
    job = Waiting(tmp_path)
    with pytest.raises(JobError, match=f"{words}.*, and was cancelled$"):
        wait(job, context(config), job.pass_time, job.clock)
    assert job.cancelled and (job.now <= MINUTE) == words.startswith("can never")


def test_a_failed_job_is_explained_by_what_came_before_the_last_words_of_srun(config: Config, tmp_path: Path) -> None:
    job, stage = SlurmJob("8", tmp_path, attached=False), context(config)
    ended = State("ended", "FAILED", failed=True)
    assert "it left no log: its node may not see runs_dir, or may not write there; log: " in explain(job, stage, ended)
    job.log(0).write_text(
        "slurmstepd-n1: error: execve(): /opt/python3: No such file or directory\n"
        "srun: error: n1: tasks 0-1: Exited with exit code 2\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=8.0\n"
        "slurmstepd-n1: error: *** STEP 8.0 ON n1 CANCELLED AT 2026-01-02T03:04:05 ***\n"
    )
    said = explain(job, stage, ended)
    assert "ends: slurmstepd-n1: error: execve(): /opt/python3: No such file or directory; log: " in said
    job.log(0).write_text("srun: unrecognized option '--container-image=x'\nTry \"srun --help\" for more information\n")
    assert "ends: srun: unrecognized option '--container-image=x'; log: " in explain(job, stage, ended)


class Leaving(LongJob):
    """A job that a flow finds in its last moments."""

    attached = True

    def state(self) -> State:
        is_over = self.now > 5
        return State("ended", "FAILED", failed=True) if is_over else State("running", "COMPLETING", is_leaving=True)

    def pass_time(self, state: State, progress: object) -> None:
        self.now += 1


def test_a_job_that_was_found_leaving_is_waited_for_and_not_reported_once_more(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0)
    stage, job = context(config), Leaving()
    segment = begin_segment(stage.stage_dir, job.job_id, "host")
    assert not end_segment(stage.stage_dir, segment.number, "failed", None, config.cluster)
    assert not wait(job, stage, job.pass_time, job.clock)  # another job follows
    assert job.now > 5


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOLCK, errno.EROFS])
def test_a_file_system_that_fails_for_a_while_ends_no_run_and_for_long_is_one_line(
    number: int, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0)
    stage, job = context(config), LongJob()
    away = range(2, 8)
    scandir = os.scandir

    def fail(folder: Path) -> object:
        if int(job.now / MINUTE) in away:
            raise OSError(number, os.strerror(number), str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(JobError, match=r"ran far beyond resources.minutes"):
        wait(job, stage, job.pass_time, job.clock)
    job.now, away = 0, range(2, 1000)
    with pytest.raises(UnseenError) as told:
        wait(job, stage, job.pass_time, job.clock)
    words = f"goes on, but its files cannot be read ({os.strerror(number)}: {stage.stage_dir})"
    assert str(told.value) == f"prepare (job 12) {words}; follow it again with: specrl resume demo"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_terminal_that_has_gone_or_a_full_disk_behind_it_ends_no_run(
    number: int, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(StringIO):
        def write(self, _: str) -> int:
            raise OSError(number, os.strerror(number))

        def flush(self) -> None:
            self.write("")

    job = LongJob()
    monkeypatch.setattr(sys, "stderr", Gone())
    with make_reporter() as reporter:
        reporter.submitted("train", job)
        reporter.note("a note")
        reporter.finished("train", 3.0, job.job_id, before=False)
    assert invoke(["show", "nobody"]) == 2
    write_config(config)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(server, "silence_of", lambda url: None)
    for name in ("check", "_open", "start_parent_run", "mark_crashed_flows", "finish", "forget_stop"):
        monkeypatch.setattr(execute, name, lambda *arguments, **more: None)
    monkeypatch.setattr("flows.pipeline.pipeline", lambda run_dir: None)
    monkeypatch.setattr(sys, "stderr", StringIO())
    monkeypatch.setattr(sys, "stdout", Gone())
    execute.execute(config)


def test_a_terminal_that_goes_away_under_the_bars_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pty.openpty()
    terminal = os.fdopen(ours, "w")
    monkeypatch.setattr(sys, "stderr", terminal)
    with make_reporter() as reporter:
        assert reporter.console.is_terminal
        os.close(theirs)
        reporter.submitted("train", LongJob())
        print("a library's warning", file=sys.stderr)
    with pytest.raises(OSError, match="Input/output"):  # it takes nothing, indeed
        terminal.close()


class SlowJob(LongJob):
    """A job that is queued until it is cancelled."""

    backend = "slow"

    def __init__(self) -> None:
        super().__init__()

    def state(self) -> State:
        return State("ended", "CANCELLED", failed=True, reason="cancelled") if self.cancelled else State("pending", "")


class SlowScheduler:
    """A scheduler that takes a job only once all jobs are being cancelled."""

    name = "slow"
    jobs: ClassVar[dict[str, SlowJob]] = {}
    submitting, asked = threading.Event(), threading.Event()

    def find(self, key: JobKey) -> SlowJob | None:
        if self.submitting.is_set():
            self.asked.set()
        job = self.jobs.get(key.job_name)
        return job if job is not None and not job.cancelled else None

    def submit(self, request: StageRequest, environment: dict[str, str]) -> SlowJob:
        self.submitting.set()
        while not stop_asked(request.context.run_dir):
            time.sleep(0.001)
        self.asked.wait(0.2)  # nobody asks as long as this job may still come
        return self.jobs.setdefault(request.key.job_name, SlowJob())


def test_a_job_that_is_submitted_while_all_are_cancelled_is_cancelled_and_the_last_one(tmp_path: Path) -> None:
    more = {"cluster": {"backend": f"{__name__}:SlowScheduler"}, "model": {"source": "tiny"}}
    config = parse_config({"name": "sweep", "runs_dir": str(tmp_path), **more})
    config.run_dir.mkdir()
    write_config(config)
    contexts = [StageContext(config, "prepare", f"prepare-{n}", tmp_path / str(n), {}, "") for n in range(2)]
    reporter = Reporter(Console(quiet=True))
    with ThreadPoolExecutor() as threads:
        cells = [threads.submit(work, context, "", tmp_path, reporter, context.key) for context in contexts]
        assert SlowScheduler.submitting.wait(60)
        end_jobs(config.run_dir, lambda line: None)
    assert all(isinstance(cell.exception(), JobError | StoppedError) for cell in cells)
    (job,) = SlowScheduler.jobs.values()
    assert job.cancelled


def test_what_prepare_noticed_about_the_rows_is_said_before_training(config: Config) -> None:
    config.run_dir.mkdir(parents=True)
    write_config(config)
    said = StringIO()
    run = Run(config, begin(config), "", Reporter(Console(file=said, soft_wrap=True)))
    folder = config.run_dir / "stages" / run.record.stage_keys["prepare"]
    write_json(folder / RESULT_FILE, {"seconds": 3.0})
    record_event(folder, "data", "7 of the 9 references looked at do not earn 1")
    record_event(folder, "restart", "nothing about rows")
    assert run_stage(run, "prepare") == folder
    assert said.getvalue().splitlines() == [
        "prepare    finished before: 0:03",
        "prepare: 7 of the 9 references looked at do not earn 1",
    ]


@pytest.fixture
def scancel(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command that says on standard error what is written into this file, and fails if that is anything."""
    folder, words = tmp_path / "bin", tmp_path / "words"
    folder.mkdir()
    (folder / "scancel").write_text(f"#!/bin/sh\ncat {words} >&2\n[ ! -s {words} ]\n")
    name = JobKey(config, "prepare-0").job_name
    (folder / "squeue").write_text(f"#!/bin/sh\necho '12|RUNNING|None|{name}'\n")
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
    end_jobs(config.run_dir, said.append, stop=False)
    assert read_segments(stage_dir)[0].reason is None
    scancel.write_text("")
    end_jobs(config.run_dir, said.append, stop=False)
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


def test_a_stop_that_is_asked_for_while_a_flow_starts_is_not_forgotten(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, found = config.run_dir / STOP_FILE, []
    config.run_dir.mkdir(parents=True)
    write_config(config)
    stop.touch()  # of the call before
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(server, "silence_of", lambda url: None)
    for name in ("check", "begin_run", "mark_crashed_flows", "finish", "render_summary"):
        monkeypatch.setattr(execute, name, lambda *arguments: None)

    def start(*arguments: object) -> None:
        found.append(stop.exists())
        stop.touch()  # specrl stop, while MLflow is slow

    monkeypatch.setattr(execute, "start_parent_run", start)
    monkeypatch.setattr("flows.pipeline.pipeline", lambda run_dir: found.append(stop.exists()))
    execute.execute(config, resumed=False)
    assert found == [False, True]


def test_a_run_whose_prefect_server_is_silent_ends_as_failed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config.run_dir.mkdir(parents=True)
    write_config(config)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    for name in ("check", "begin_run", "start_parent_run"):
        monkeypatch.setattr(execute, name, lambda *arguments: None)
    ended: list[str] = []
    monkeypatch.setattr(execute, "finish", lambda config, status, error: ended.append(f"{status}: {error}"))
    with pytest.raises(server.ServerError):
        execute.execute(config, resumed=False)
    [said] = ended
    assert said.startswith("FAILED: no Prefect server answers at http://127.0.0.1:9/api")


def test_a_full_disk_does_not_hide_why_a_run_ended(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []

    def full(path: Path, _: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    config.run_dir.mkdir(parents=True)
    write_config(config)
    monkeypatch.setattr(execute, "write_json", full)
    monkeypatch.setattr(execute, "finish_parent_run", lambda _, status, *more: ended.append(status))
    execute.finish(config, "FAILED", JobError("the cause"))
    assert ended == ["FAILED"]
    with pytest.raises(OSError, match="No space left"):
        execute.finish(config, "FINISHED")


def test_a_local_job_that_somebody_cancelled_is_not_said_to_lack_an_error(config: Config, tmp_path: Path) -> None:
    stage, job = context(config), LocalJob(Record("local", "7", None, "host"), tmp_path, attached=False)
    segment = begin_segment(stage.stage_dir, "7", "host")
    assert not end_segment(stage.stage_dir, segment.number, "cancelled", None, config.cluster)
    assert "COMPLETED): it was cancelled; log: " in explain(job, stage, State("ended", "COMPLETED"))
