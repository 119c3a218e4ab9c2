"""What the timer of a step says."""

from __future__ import annotations

from specrl.timeline import Timer


def test_seconds_of_parts_add_up() -> None:
    timer = Timer()
    with timer("update"):
        assert set(timer.seconds) == {"update"}  # also of a part under way
    with timer("update"):
        pass
    assert len(timer.spans) == 2
    assert timer.seconds["update"] >= 0
