"""Charts as SVG text, drawn by matplotlib without a display.

Text stays text, so that pages can be searched, and equal figures give equal bytes. The palette is Okabe and Ito's,
which suits all kinds of colour vision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any

from specrl.timeline import GENERATION, PREGENERATION, SPOT_TRAINING, RankTimeline, Span

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#000000", "#b3a800")
MARKERS = "os^Dv*PX"
MARK_STYLES = ("--", ":", "-.")  # of vertical marker lines
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specrl",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}
SIZE = (560, 280)  # pixels, without the legend
LEGEND_COLUMNS = 3
LEGEND_ROW = 20  # pixels
PIXELS_PER_INCH = 72
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


def line_chart(
    series: Mapping[str, Sequence[tuple[float, ...]]],
    x_label: str,
    y_label: str,
    marks: Mapping[float, str] | None = None,
) -> str:
    """Draw a line for each name, and a vertical line at each mark; marks named "" are left out of the legend.

    Points are (x, y), or (x, y, low, high) to draw a band from low to high behind the line.
    """

    def paint(axes: Any) -> None:
        for index, (name, points) in enumerate(series.items()):
            x, y, *band = zip(*points, strict=True)
            colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
            if band:
                axes.fill_between(x, *band, color=colour, alpha=0.15, linewidth=0)
            axes.plot(x, y, label=name, color=colour, marker=marker)
        for index, (place, words) in enumerate((marks or {}).items()):
            axes.axvline(place, color="#888888", linestyle=MARK_STYLES[index % len(MARK_STYLES)], label=words)
        low, whole = min(0.0, axes.dataLim.y0), all(x == int(x) for points in series.values() for x, *_ in points)
        high = low + 1.05 * span if (span := axes.dataLim.y1 - low) > 0 else None
        axes.set(xlabel=x_label, ylabel=y_label, ylim=(low, high))
        axes.xaxis.get_major_locator().set_params(integer=whole, min_n_ticks=1)

    return draw(paint, [*filter(None, series), *(marks or {}).values()])


def histogram(values: Sequence[float], bins: int, x_label: str, y_label: str) -> str:
    def paint(axes: Any) -> None:
        axes.hist(values, bins=bins, color=COLOURS[0], edgecolor="white", linewidth=0.5)
        axes.set(xlabel=x_label, ylabel=y_label)

    return draw(paint)


def draw(paint: Callable[[Any], None], names: Sequence[str] = ()) -> str:
    """Return as SVG what `paint` draws on new matplotlib axes, with a legend of the names below."""
    import matplotlib
    from matplotlib.figure import Figure

    width, height = SIZE[0], SIZE[1] + LEGEND_ROW * -(-len(names) // LEGEND_COLUMNS)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH), layout="constrained")
        axes = figure.subplots()
        paint(axes)
        if names:
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=LEGEND_COLUMNS)
        return svg_of(figure)


def gantt(ranks: Sequence[RankTimeline]) -> str:
    """Draw one step as a Gantt chart: a row per rank, a box per span of work, blanks where a rank waits."""
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
        titles[name] = f"<title>{escape(span.name)}: {left:.2f} to {left + width:.2f} s</title>"
        box = Rectangle((left, place - BOX / 2), width, BOX, color=SPAN_COLOURS[span.name], linewidth=0.5)
        # Only the first box of a kind gets a legend entry.
        box.set(gid=name, clip_on=False, label=labels.pop(span.name, None))
        axes.add_artist(box)
    return titles


def svg_of(figure: Any, titles: Mapping[str, str] | None = None) -> str:
    """A figure as an SVG element, without date, creator or document type; `titles` are `<title>` elements by `gid`."""
    text = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(text, format="svg", metadata=nothing)
    width, height = (PIXELS_PER_INCH * inches for inches in figure.get_size_inches())
    _, _, body = text.getvalue().partition("<svg ")
    _, _, body = body.partition(">")
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    )
    # Group ids would not be unique on a page with several pictures.
    body = re.sub(r'<g id="([^"]*)">', lambda match: f"<g>{(titles or {}).get(match[1], '')}", body)
    return head + body


def embedded(svg: str) -> str:
    """Prepare an SVG element for an HTML page, which needs no XML namespaces."""
    head, mark, body = svg.partition(">")
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", head) + mark + body
