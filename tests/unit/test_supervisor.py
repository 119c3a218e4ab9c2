"""How a rank ends a job whose first rank never came up."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from slurm.backend import JobPlace, StageRequest
from slurm.failures import first_error
from slurm.local import END_AT, JOB_ID, Controller, LocalBackend
from slurm.supervisor import AGAIN_CODE, ATTEMPT, Supervisor
from specrl.config import parse_config
from specrl.context import StageContext
from specrl.lifetime import LeftJobError, Stop
from specrl.lifetime.segments import begin_segment, read_segments

LOST = Stop("killed", "the connection to another rank was lost")


class Job:
    """A job of two ranks on this machine, each of which is asked what it does."""

    def __init__(self, runs_dir: Path, patch: pytest.MonkeyPatch) -> None:
        config = parse_config(
            {
                "name": "demo",
                "runs_dir": str(runs_dir),
                "model": {"source": "tiny"},
                "cluster": {"max_attempts": 2},
            }
        )
        self.patch, self.stage_dir = patch, config.run_dir / "stages" / "prepare-0"
        self.stage_dir.mkdir(parents=True)
        self.request = StageRequest(StageContext(config, "prepare", "prepare-0", self.stage_dir, {}, ""), "no:where")

    def rank(self, rank: int, job_id: str, attempt: int = 0) -> Supervisor:
        known = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": 29500, ATTEMPT: attempt, END_AT: time.time() + 600}
        for name, value in {**known, JOB_ID: job_id}.items():
            self.patch.setenv(name, str(value))
        return Supervisor(self.request, LocalBackend())

    def ended(self) -> list[tuple[str, int, str | None]]:
        return [(segment.job_id, segment.attempt, segment.reason) for segment in read_segments(self.stage_dir)]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def test_jobs_whose_first_rank_never_comes_up_are_counted(job: Job) -> None:
    assert job.rank(1, "7")._leave(LOST) == AGAIN_CODE
    assert job.rank(1, "7", attempt=1)._leave(LOST) == 1
    assert job.ended() == [("7", 0, "killed"), ("7", 1, "killed")]
    assert "cluster.max_attempts = 2 reached" in str(read_segments(job.stage_dir)[-1].gave_up)


def test_the_job_before_is_ended_by_the_second_rank_where_it_could_not_say_so_itself(job: Job) -> None:
    begin_segment(job.stage_dir, "6", "host")
    assert job.rank(1, "7")._leave(LOST) == 1
    assert job.ended() == [("6", 0, "killed"), ("7", 0, "killed")]


def test_the_second_rank_ends_the_segment_that_the_first_has_begun(job: Job) -> None:
    job.rank(0, "7")._begin()
    assert job.rank(1, "7")._leave(LOST) == AGAIN_CODE
    assert job.ended() == [("7", 0, "killed")]


def test_a_first_rank_that_comes_up_too_late_begins_nothing(job: Job) -> None:
    first = job.rank(0, "7")
    assert job.rank(1, "7")._leave(LOST) == AGAIN_CODE
    with pytest.raises(LeftJobError) as left:
        first._begin()
    assert first._leave(left.value.stop) == 1
    assert job.ended() == [("7", 0, "killed")]


@pytest.mark.parametrize(
    ("seconds", "for_this_rank"), [(None, True), (600, True), (30, False)], ids=["silent", "as-before", "preempted"]
)
def test_a_sigterm_says_that_the_job_is_preempted_only_where_its_end_has_come_forward(
    seconds: float | None, for_this_rank: bool, job: Job
) -> None:
    first = job.rank(0, "7")
    first._begin()
    end_at = first._end_at
    assert end_at is not None
    place = JobPlace("7", end_at if seconds == 600 else None if seconds is None else time.time() + seconds)
    assert first._is_for_this_rank(place) == for_this_rank


def test_a_job_that_was_given_more_time_is_left_later(job: Job) -> None:
    first = job.rank(0, "7")
    first._begin()
    leave_by = first.lifetime.leave_by
    assert leave_by is not None
    job.patch.setenv(END_AT, str(float(os.environ[END_AT]) + 3600))
    first._look_as_first()
    assert first.lifetime.leave_by == leave_by  # it is asked only now and then
    now = time.monotonic() + 400  # of 590 s
    job.patch.setattr("time.monotonic", lambda: now)
    first._look_as_first()
    assert first.lifetime.leave_by == pytest.approx(leave_by + 3600)
    job.patch.setenv(END_AT, str(float(os.environ[END_AT]) + 3600))
    first._look_as_first()
    assert first.lifetime.leave_by == pytest.approx(leave_by + 3600)


def test_a_clock_that_is_set_ends_no_job_and_no_step(job: Job) -> None:
    first = job.rank(0, "7")
    first._begin()
    first.lifetime.expect_steps()
    now = time.time()
    job.patch.setattr("time.time", lambda: now + 24 * 3600)
    assert first.lifetime.overdue() is None
    first._look_as_first()  # would end this process
    assert first.lifetime.stop is None


def test_a_file_system_that_fails_has_the_stage_go_on_in_another_job_until_it_gets_no_further(job: Job) -> None:
    job.patch.setattr("slurm.supervisor.CAUSE_SECONDS", 0)
    error = OSError(errno.ESTALE, "Stale file handle", "/scratch/model.safetensors")
    for attempt, code in ((0, AGAIN_CODE), (1, 1)):
        first = job.rank(0, "7", attempt)
        first.request.key.folder.mkdir(parents=True, exist_ok=True)
        first._begin()
        assert first._raised(error) == code
    gave_up = str(read_segments(job.stage_dir)[-1].gave_up)
    assert gave_up.endswith("the last time: [Errno 116] Stale file handle: '/scratch/model.safetensors'")
    failed = first_error(first.request.key.folder, 2)
    assert failed is not None and failed.killed


def test_a_lost_rank_is_said_in_plain_words(job: Job) -> None:
    job.patch.setattr("slurm.supervisor.CAUSE_SECONDS", 0)
    for attempt in range(2):
        first = job.rank(0, "7", attempt)
        first.request.key.folder.mkdir(parents=True, exist_ok=True)
        first._begin()
        first._raised(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    gave_up = str(read_segments(job.stage_dir)[-1].gave_up)
    assert gave_up.endswith("the last time: the connection to another rank was lost")


def test_a_rank_that_memory_ran_out_for_ends_the_stage_where_it_got_no_further(job: Job) -> None:
    job.patch.setattr("slurm.supervisor.CAUSE_SECONDS", 0)
    lost, log = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), "7_0_log.out"
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n"
    requeued = "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-27T17:15:53 DUE TO JOB REQUEUE ***\n"
    attempts = ((killed, "made", AGAIN_CODE), (killed + requeued, "", AGAIN_CODE), (requeued + killed, "", 1))
    for attempt, (text, made, code) in enumerate(attempts):
        first = job.rank(0, "7", attempt)
        first.request.key.folder.mkdir(parents=True, exist_ok=True)
        first._begin()
        (first.request.key.folder / log).write_text(text)
        if made:
            (job.stage_dir / made).touch()
        assert first._raised(lost) == code
    assert [reason for _, _, reason in job.ended()] == ["killed", "killed", "out of memory"]


def test_a_file_system_that_neither_takes_nor_gives_what_ranks_raise_has_the_stage_go_on(job: Job) -> None:
    error = OSError(errno.EROFS, "Read-only file system", "/scratch/model.safetensors")

    def refuse(*_: object) -> None:
        raise error

    job.patch.setattr("slurm.supervisor.CAUSE_SECONDS", 0)
    for function in ("write_error", "has_cause"):
        job.patch.setattr(f"slurm.supervisor.{function}", refuse)
    first = job.rank(0, "7")
    first._begin()
    job.patch.setattr("slurm.supervisor.end_segment", refuse)
    assert first._raised(error) == AGAIN_CODE


def test_a_local_job_that_could_not_record_why_it_ends_is_started_again_all_the_same(job: Job) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        controller = Controller(job.request)
    finally:
        signal.signal(signal.SIGTERM, handler)
    begin_segment(job.stage_dir, "7", "host")
    controller.exit_codes = [AGAIN_CODE, 1]
    assert controller._goes_on(0)
    assert job.ended() == [("7", 0, "killed")]
