"""What the timer of a step says."""

from __future__ import annotations

from specrl.timeline import Timer


def test_seconds_of_parts_add_up_and_scattered_ones_are_among_them() -> None:
    timer = Timer()
    with timer("update"):
        timer.scattered["kv_scales"] = 0.25
        assert set(timer.seconds) == {"update", "kv_scales"}  # also of a part under way
    with timer("update"):
        pass
    assert len(timer.spans) == 2
    assert timer.seconds["kv_scales"] == 0.25
    assert timer.seconds["update"] >= 0
