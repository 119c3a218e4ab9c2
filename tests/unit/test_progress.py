from __future__ import annotations

from pathlib import Path

import pytest

from specrl.progress import Progress, ProgressState, clock, read_progress, words


def test_progress_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    with Progress(tmp_path) as progress:
        progress.update(2, 8, message="reward 0.50", unit="step", phase="train")
        state = read_progress(tmp_path)
    assert state is not None
    assert (state.done, state.total, state.message, state.unit) == (2, 8, "train: reward 0.50", "step")


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Progress(tmp_path, enabled=False) as progress:
        progress.update(1, 2)
    assert list(tmp_path.iterdir()) == []


def test_updates_are_written_now_and_then_but_the_last_one_always(tmp_path: Path) -> None:
    with Progress(tmp_path, interval=3600) as progress:
        for done in range(5):
            progress.update(done, 10)
        state = read_progress(tmp_path)
        assert state is not None
        assert state.done == 0
    state = read_progress(tmp_path)
    assert state is not None
    assert state.done == 4


def test_the_estimate_counts_from_where_the_phase_began() -> None:
    resumed = ProgressState(6, 8, "", "step", started_at=100.0, started_done=5, updated_at=130.0)
    assert resumed.eta_seconds == pytest.approx(60.0)
    assert ProgressState(5, 8, "", "step", 100.0, 5, 100.0).eta_seconds is None


def test_progress_is_said_with_unit_message_and_time_left() -> None:
    state = ProgressState(2, 8, "reward 0.50", "step", started_at=0.0, started_done=0, updated_at=20.0)
    assert words(state) == "2/8 step  reward 0.50  ETA 1:00"
    assert words(ProgressState(8, 8, "", "step", 0.0, 0, 20.0)) == "8/8 step"
    assert clock(3725) == "1:02:05"


def test_a_disk_that_is_full_ends_no_stage_because_of_its_progress(tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    with Progress(folder) as progress:
        folder.write_text("")  # so that nothing can be written there, whoever runs this
        progress.update(2, 2)
    assert read_progress(folder) is None
