"""Stages that need more than one job on this machine, and how each of those jobs ended."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import invoke
from flows.folder import write_config
from slurm.backend import JobError, StoppedError, forget_stop
from slurm.watch import wait
from specrl.config import Config
from specrl.context import StageContext
from specrl.events import read_events
from specrl.lifetime.segments import read_segments
from tests.slurm.test_local_jobs import nothing, ranks_of, submit

MakeRun = Callable[..., Config]


@pytest.fixture
def quick(make_run: MakeRun) -> Callable[..., Config]:
    """A run whose ranks count as hanging after six seconds."""

    def make(**resources: int) -> Config:
        config = make_run("local", **resources)
        cluster = config.cluster.model_copy(update={"hang_minutes": 0.1})
        config = config.model_copy(update={"cluster": cluster})
        write_config(config)
        return config

    return make


def reasons(context: StageContext) -> list[str | None]:
    return [segment.reason for segment in read_segments(context.stage_dir)]


def wait_until(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_signal_is_heard_while_the_main_thread_sits_in_a_collective(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "block")
    context, job = submit(make_run("local"))
    first, _ = ranks_of(context.run_dir)
    time.sleep(3)  # it has joined the others by now, on most machines, and waits
    os.kill(first, signal.SIGUSR2)
    assert wait(job, context, nothing)  # the one that it waited for sleeps for 100 s
    assert reasons(context) == ["walltime", "finished"]


def test_a_rank_that_is_killed_is_no_failure_of_the_rank_that_waits_for_it(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "lose")
    context, job = submit(make_run("local"))
    assert wait(job, context, nothing)
    assert reasons(context) == ["killed", "finished"]


def test_an_error_is_named_and_not_the_lost_connection_that_follows(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "raise")
    context, job = submit(make_run("local"))
    with pytest.raises(JobError, match=r"ValueError: the stage went wrong \(rank 1\)"):
        wait(job, context, nothing)
    assert reasons(context) == ["failed"]


def test_a_rank_that_freezes_ends_the_job_and_the_stage_goes_on(
    quick: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "freeze")
    context, job = submit(quick())
    assert wait(job, context, nothing)
    assert reasons(context) == ["hang", "finished"]
    log = text(job.log(0))
    assert re.search(r"rank 1 has given no sign of life for \d+ s; ending the job", log)
    assert 'dummy_stage.py", line' in log  # the stacks
    assert [event.kind for event in read_events(context.stage_dir)] == ["hang", "restart"]


def test_a_step_that_never_ends_is_found_by_the_time_that_steps_take(
    quick: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "stuck")
    monkeypatch.setenv("DUMMY_STEPS", "5")
    context, job = submit(quick(ranks_per_node=1))
    assert wait(job, context, nothing)
    hung, finished = read_segments(context.stage_dir)
    assert (hung.reason, hung.last_step, finished.reason) == ("hang", 2, "finished")
    assert 'dummy_stage.py", line' in text(job.log(0))
    event = read_events(context.stage_dir)[0]
    assert (event.kind, event.step) == ("hang", 3)
    assert event.text.startswith("step 3 has taken ")


def test_a_stage_that_gets_no_further_is_given_up(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "kill")
    config = make_run("local", ranks_per_node=1)
    context, job = submit(config)
    with pytest.raises(JobError, match=r"no progress in 3 jobs in a row \(killed, killed, killed\): cluster.max_attem"):
        wait(job, context, nothing)
    monkeypatch.setenv("DUMMY_PREPARE", "0")
    context, job = submit(config)
    assert wait(job, context, nothing)


def test_a_run_that_is_asked_to_stop_leaves_at_a_step_and_goes_on_there(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "steps")
    monkeypatch.setenv("DUMMY_STEPS", "300")
    monkeypatch.setenv("DUMMY_DISTURBED", "2")
    config = make_run("local", ranks_per_node=1)
    context, job = submit(config)
    wait_until(lambda: len(text(context.stage_dir / "steps.txt").split()) > 3)
    assert invoke(["stop", str(config.run_dir)]) == 0
    assert capsys.readouterr().out == (
        f"local job {job.job_id} leaves after the step that runs\n"
        "dummy is asked to stop; continue it with: specrl resume dummy\n"
    )
    with pytest.raises(
        StoppedError, match=r"run dummy was stopped in prepare after step \d+; continue it with: specrl"
    ):
        wait(job, context, nothing)
    forget_stop(config.run_dir)
    context, again = submit(config)
    os.kill(int(again.job_id), 0)
    wait_until(lambda: len(read_segments(context.stage_dir)) == 2)
    wait_until(lambda: read_segments(context.stage_dir)[1].first_step is not None)
    os.killpg(int(again.job_id), signal.SIGTERM)  # as a machine that is to be free: it finishes its step too
    assert wait(again, context, nothing)
    first, second, third = read_segments(context.stage_dir)
    assert (first.reason, second.reason, third.reason) == ("stopped", "preempted", "finished")
    assert first.last_step is not None
    assert (first.first_step, second.first_step) == (0, first.last_step + 1)
    assert text(context.stage_dir / "steps.txt").split() == [str(step) for step in range(300)]
