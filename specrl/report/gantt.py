"""A step as a Gantt chart: one row per rank, one box per span of work, and blank where a rank waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrl.report.plots import draw
from specrl.timeline import GENERATION, PREGENERATION, SPOT_TRAINING, RankTimeline

SPAN_COLOURS = {
    GENERATION: "#0072b2",
    PREGENERATION: "#56b4e9",
    SPOT_TRAINING: "#e69f00",
    "logprob": "#f0e442",
    "policy_update": "#009e73",
    "drafter_update": "#d55e00",
    "refit": "#cc79a7",
    "validation": "#999999",
    "checkpoint": "#000000",
}
"""A span without a colour is not drawn."""
WIDTH, ROW, AXIS = 900, 26, 50  # of the picture, and the heights of a rank's row and of the time axis, in pixels
BOX = 0.65  # the height of a box, as a share of its row


def gantt(ranks: Sequence[RankTimeline]) -> str:
    """A step of all ranks, drawn to scale as SVG, in seconds since the first rank began."""
    drawn = [(place, span) for place, rank in enumerate(ranks) for span in rank.spans if span.name in SPAN_COLOURS]
    places, spans = zip(*drawn, strict=True)
    start, end = min(span.started_at for span in spans), max(span.ended_at for span in spans)
    lefts, widths = [span.started_at - start for span in spans], [span.ended_at - span.started_at for span in spans]
    names, titles = dict.fromkeys(span.name for span in spans), dict[str, str]()

    def paint(axes: Any) -> None:
        colours = [SPAN_COLOURS[span.name] for span in spans]
        edges = {"edgecolor": colours, "linewidth": 0.5, "clip_on": False}  # so that short spans can be seen
        boxes = axes.barh(places, widths, BOX, lefts, color=colours, **edges)
        for box, span, left in zip(boxes, spans, lefts, strict=True):
            box.set(gid=f"span-{len(titles)}", in_layout=False)  # the layout would look at each
            titles[box.get_gid()] = f"{span.name}: {left:.2f} to {span.ended_at - start:.2f} s"
        for name in names:
            axes.barh(0, 0, color=SPAN_COLOURS[name], label=name.replace("_", " "))
        axes.set(xlabel="seconds since the first rank began the step", xlim=(0, max(end - start, 1e-9)))
        axes.set(ylim=(len(ranks) - 0.5, -0.5))
        axes.set_yticks(range(len(ranks)), [f"rank {rank.bubble.rank}" for rank in ranks])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)

    return draw(paint, (WIDTH, ROW * len(ranks) + AXIS), list(names), titles)
