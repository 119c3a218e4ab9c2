"""The record of a stage's jobs, and when a stage is given up."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrl.config import ClusterConfig
from specrl.events import read_events, record_event
from specrl.lifetime.segments import SEGMENTS_FILE, Reason, add_to_segment, begin_segment, end_segment, read_segments

LIMITS = ClusterConfig(max_attempts=2)


def job(stage_dir: Path, reason: Reason, progress: str = "", limits: ClusterConfig = LIMITS) -> bool:
    """One job of the stage, which leaves the file `progress`, if any; whether the stage is to go on in another one."""
    segment = begin_segment(stage_dir, "7", "host")
    if progress:
        stage_dir.mkdir(parents=True, exist_ok=True)
        (stage_dir / progress).write_text("done")
    return end_segment(stage_dir, segment.number, reason, None, limits)


def test_what_is_known_first_of_a_segment_stays(tmp_path: Path) -> None:
    begin_segment(tmp_path, "7", "host")
    add_to_segment(tmp_path, 1, first_step=3)
    assert end_segment(tmp_path, 1, "walltime", 5, LIMITS)
    assert end_segment(tmp_path, 1, "failed", None, LIMITS)  # whoever comes later only hears what is to happen
    (segment,) = read_segments(tmp_path)
    assert (segment.reason, segment.first_step, segment.last_step, segment.job_id) == ("walltime", 3, 5, "7")
    assert len((tmp_path / SEGMENTS_FILE).read_text().splitlines()) == 3


def test_a_line_that_was_cut_short_costs_nothing_else(tmp_path: Path) -> None:
    job(tmp_path, "preempted")
    with (tmp_path / SEGMENTS_FILE).open("a") as file:
        file.write('{"number": 1, "gave')
    job(tmp_path, "finished")
    assert [segment.reason for segment in read_segments(tmp_path)] == ["preempted", "finished"]


def test_a_stage_without_progress_is_given_up_and_begins_anew_when_it_is_resumed(tmp_path: Path) -> None:
    assert job(tmp_path, "hang", progress="one")
    assert job(tmp_path, "hang")
    assert not job(tmp_path, "killed")
    gave_up = read_segments(tmp_path)[-1].gave_up
    assert gave_up is not None
    assert gave_up.startswith("no progress in 2 jobs in a row (hang, killed): cluster.max_attempts = 2")
    assert job(tmp_path, "hang")


def test_progress_of_training_is_a_checkpoint_and_no_rollout(tmp_path: Path) -> None:
    train = tmp_path / "train-0"
    (train / "checkpoints").mkdir(parents=True)
    assert job(train, "walltime", progress="rollouts")
    assert not job(train, "walltime", progress="steps")
    assert job(train, "walltime", progress="checkpoints/step=1")
    assert job(train, "walltime", progress="checkpoints/step=2")


def test_the_best_checkpoint_that_a_continuation_adopts_is_no_progress(tmp_path: Path) -> None:
    train = tmp_path / "train-0"
    (train / "checkpoints").mkdir(parents=True)
    assert job(train, "hang")
    assert not job(train, "hang", progress="checkpoints/best.json")


def test_the_load_that_other_nodes_leave_for_the_first_rank_is_no_progress(tmp_path: Path) -> None:
    (tmp_path / "load").mkdir()
    assert job(tmp_path, "hang")
    assert not job(tmp_path, "hang", progress="load/1.json")


def test_what_the_cluster_takes_away_counts_a_tenth(tmp_path: Path) -> None:
    assert all(job(tmp_path, "preempted") for _ in range(19))
    assert not job(tmp_path, "preempted")


def test_the_number_of_jobs_may_be_limited(tmp_path: Path) -> None:
    limits = ClusterConfig(max_segments=2)
    assert job(tmp_path, "walltime", "one", limits)
    assert not job(tmp_path, "walltime", "two", limits)
    assert read_segments(tmp_path)[-1].gave_up == "not finished after 2 jobs: cluster.max_segments = 2"
    assert job(tmp_path, "walltime", "three", limits)


@pytest.mark.parametrize("reason", ["finished", "stopped", "failed", "cancelled"])
def test_some_jobs_are_not_followed_by_another_one(tmp_path: Path, reason: Reason) -> None:
    assert not job(tmp_path, reason)


def test_events_are_read_as_they_were_recorded(tmp_path: Path) -> None:
    record_event(tmp_path, "restart", "job 2 goes on")
    record_event(tmp_path, "hang", "rank 1 is silent", step=3)
    assert [(event.kind, event.text, event.step) for event in read_events(tmp_path)] == [
        ("restart", "job 2 goes on", None),
        ("hang", "rank 1 is silent", 3),
    ]
