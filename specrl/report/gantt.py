"""A step as a Gantt chart: one row per rank, one box per span of work, blanks where a rank waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrl.report.plots import PIXELS_PER_INCH, STYLE, svg_of
from specrl.timeline import GENERATION, PREGENERATION, SPOT_TRAINING, RankTimeline, Span

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
WIDTH, ROW = 900, 26  # width of the picture and height of a rank's row, in pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 8, 78
"""The margins, in pixels: rank names on the left, time axis and legend at the bottom."""
BOX = 0.65  # the height of a box, as a share of its row


def gantt(ranks: Sequence[RankTimeline]) -> str:
    """Draw one step of all ranks as SVG, in seconds since the first rank began."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [(place, span) for place, rank in enumerate(ranks) for span in rank.spans if span.name in SPAN_COLOURS]
    start, end = min(span.started_at for _, span in drawn), max(span.ended_at for _, span in drawn)
    height = TOP + ROW * len(ranks) + BOTTOM
    with matplotlib.rc_context({**STYLE, "axes.spines.left": False}):
        figure = Figure(figsize=(WIDTH / PIXELS_PER_INCH, height / PIXELS_PER_INCH))
        axes = figure.add_axes(
            (LEFT / WIDTH, BOTTOM / height, 1 - (LEFT + RIGHT) / WIDTH, ROW * len(ranks) / height),
            xlim=(0, max(end - start, 1e-9)),
            ylim=(len(ranks) - 0.5, -0.5),
            xlabel="seconds since the first rank began the step",
        )
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(len(ranks)), [f"rank {rank.bubble.rank}" for rank in ranks])
        axes.tick_params(axis="y", length=0)
        titles = _draw_boxes(axes, drawn, start)
        figure.legend(loc="lower center", ncols=4)
        return svg_of(figure, titles)


def _draw_boxes(axes: Any, drawn: Sequence[tuple[int, Span]], start: float) -> dict[str, str]:
    from matplotlib.patches import Rectangle

    titles, labels = dict[str, str](), {span.name: span.name.replace("_", " ") for _, span in drawn}
    for place, span in drawn:
        left, width, name = span.started_at - start, span.ended_at - span.started_at, f"span-{len(titles)}"
        titles[name] = f"{span.name}: {left:.2f} to {left + width:.2f} s"
        box = Rectangle((left, place - BOX / 2), width, BOX, color=SPAN_COLOURS[span.name], linewidth=0.5)
        # Only the first box of a kind gets a legend entry.
        box.set(gid=name, clip_on=False, label=labels.pop(span.name, None))
        axes.add_artist(box)
    return titles
