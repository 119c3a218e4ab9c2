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


def svg_of(figure: Any, titles: Mapping[str, str] | None = None) -> str:
    """Return a figure as an SVG element, without date, creator or document type; `titles` are tooltips by `gid`."""
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
    body = re.sub(r'<g id="([^"]*)">', lambda match: f"<g>{_title((titles or {}).get(match[1]))}", body)
    return head + body


def embedded(svg: str) -> str:
    """Prepare an SVG element for an HTML page, which needs no XML namespaces."""
    head, mark, body = svg.partition(">")
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", head) + mark + body


def _title(text: str | None) -> str:
    return "" if text is None else f"<title>{escape(text)}</title>"
