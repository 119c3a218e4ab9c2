"""Whether a step may begin, and whether one takes too long, on a clock that the test sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm.supervisor import Heartbeats
from specrl.config import ClusterConfig
from specrl.lifetime import Lifetime, Stop


class Ranks:
    """The ranks of a job of which this one is the first; the others have wishes of their own."""

    def __init__(self, *others: Stop | None) -> None:
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def life(clock: Clock) -> Lifetime:
    lifetime = Lifetime(ClusterConfig(hang_minutes=1, start_minutes=5), clock)
    lifetime.expect_steps()
    return lifetime


def test_a_step_that_does_not_fit_with_its_checkpoint_is_not_begun(life: Lifetime, clock: Clock) -> None:
    life.leave_by = 1100
    life.begin_steps(4)
    assert life.at_boundary(Ranks(), 4) is None
    clock.now += 30
    life.saved(10)
    assert life.at_boundary(Ranks(), 5) is None  # 70 s are left, 37.5 + 15 s are needed
    clock.now += 20
    stop = life.at_boundary(Ranks(), 6)
    assert stop == Stop("walltime", "50 s are left, a step with a checkpoint may take 52 s")
    assert (life.first_step, life.last_step) == (4, 5)


def test_the_steps_of_earlier_jobs_tell_too_but_the_first_step_always_begins(life: Lifetime, clock: Clock) -> None:
    life.leave_by = 1100
    life.begin_steps(0, past_seconds=[200, 80])
    assert life.at_boundary(Ranks(), 0) is None
    clock.now += 1
    stop = life.at_boundary(Ranks(), 1)
    assert stop is not None
    assert "may take 100 s" in stop.text


def test_the_wish_of_any_rank_is_the_answer_on_all_and_the_first_wish_stays(life: Lifetime) -> None:
    life.begin_steps(0)
    wish = Stop("preempted", "SIGTERM")
    assert life.at_boundary(Ranks(None, wish), 0) == wish
    life.ask_to_leave(Stop("stopped", "specrl stop"))
    life.ask_to_leave(wish, leave_by=1010)
    assert life.at_boundary(Ranks(wish), 1) == Stop("stopped", "specrl stop")
    assert life.leave_by == 1010


def test_a_step_is_overdue_by_its_own_history(life: Lifetime, clock: Clock) -> None:
    clock.now += 301
    assert life.overdue() == "the start of the stage has taken 301 s"
    life.begin_steps(7)
    life.at_boundary(Ranks(), 7)
    clock.now += 20
    life.at_boundary(Ranks(), 8)
    clock.now += 199
    assert life.overdue() is None  # more than the floor, less than ten steps
    clock.now += 2
    assert life.overdue() == "step 8 has taken 201 s, where 20.0 s are usual"
    life.end_steps()
    assert life.overdue() is None


def test_a_validation_has_a_history_of_its_own(life: Lifetime, clock: Clock) -> None:
    """It may take many times as long as a step, and that is no hang; but no step is begun that it does not fit into."""
    life.leave_by = 2300
    life.begin_steps(0, past_validations=[100])
    for step in range(2):
        assert life.at_boundary(Ranks(), step, validates=True) is None
        clock.now += 4
        with life.validation():
            clock.now += 400
            assert life.overdue() is None  # ten times the 100 s of the earlier one
        clock.now += 1
    assert life.at_boundary(Ranks(), 2) is None  # 490 s are left for a step of 5 s
    stop = life.at_boundary(Ranks(), 3, validates=True)
    assert stop is not None
    assert stop.text == "490 s are left, a step with a checkpoint may take 506 s"
    with life.validation():
        clock.now += 4001
        assert life.overdue() == "the validation in step 3 has taken 4001 s, where 400.0 s are usual"


def test_time_in_which_a_job_was_suspended_does_not_count(life: Lifetime, clock: Clock, tmp_path: Path) -> None:
    heartbeats = [Heartbeats(tmp_path / "1", rank, 2, clock) for rank in range(2)]
    heartbeats[1].beat()
    assert heartbeats[0].stopped(60, 300) is None
    clock.now += 1000
    heartbeats[0].look_anew()
    life.held_up(1000)
    assert heartbeats[0].stopped(60, 300) is None
    assert life.overdue() is None


def test_a_stage_without_steps_is_never_overdue(clock: Clock) -> None:
    life = Lifetime(ClusterConfig(), clock)
    clock.now += 10**6
    assert life.overdue() is None


def test_a_rank_that_stops_while_it_writes_a_sign_of_life_is_named(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "1"
    heartbeats = [Heartbeats(folder, rank, 2, clock) for rank in range(2)]
    heartbeats[1].beat()
    assert heartbeats[0].stopped(60, 300) is None
    clock.now += 10
    (folder / "rank-1").write_text("")
    assert heartbeats[0].stopped(60, 300) is None
    clock.now += 51
    assert heartbeats[0].stopped(60, 300) == "rank 1 has given no sign of life for 61 s"


def test_a_rank_whose_heart_stops_is_named(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "1"
    heartbeats = [Heartbeats(folder, rank, 3, clock) for rank in range(3)]
    for heartbeat in heartbeats[:2]:
        heartbeat.beat()
    assert [heartbeat.stopped(60, 300) for heartbeat in heartbeats] == [None, None, None]
    clock.now += 61
    heartbeats[0].beat()
    assert heartbeats[0].stopped(60, 300) == "rank 1 has given no sign of life for 61 s"  # rank 2 may still be starting
    assert heartbeats[1].stopped(60, 300) is None
    clock.now += 61
    assert heartbeats[1].stopped(60, 300) == "rank 0 has given no sign of life for 61 s"
    heartbeats[0].report_hang("rank 1")
    assert heartbeats[2].reported_hang()
    assert not Heartbeats(tmp_path / "2", 0, 3, clock).reported_hang()
    assert not folder.exists()
