"""What the timer of a step says."""

from __future__ import annotations

from dataclasses import asdict

from specrl.timeline import GENERATION, Bubble, RankTimeline, Span, Timer, rank_spans, timeline_from


def test_seconds_of_parts_add_up() -> None:
    timer = Timer()
    with timer("update"):
        assert set(timer.seconds) == {"update"}  # also of a part under way
    with timer("update"):
        pass
    assert len(timer.spans) == 2
    assert timer.seconds["update"] >= 0


def test_refills_are_a_part_of_a_ranks_row() -> None:
    refills = [Span(GENERATION, 15.0, 17.0), Span(GENERATION, 18.0, 18.5)]
    bubble = Bubble(0, 10.0, 13.0, refills=refills)
    timeline = RankTimeline(bubble, rank_spans(bubble, [Span("step", 10.0, 20.0), Span("refit", 19.0, 20.0)]))
    assert timeline.spans == [Span(GENERATION, 10.0, 13.0), *refills, Span("refit", 19.0, 20.0)]
    assert timeline_from(asdict(timeline)) == timeline
