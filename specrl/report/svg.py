"""A few small plots as inline SVG: a page of them needs neither scripts nor other files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

WIDTH, HEIGHT, MARGIN = 560, 240, 44
COLOURS = ("#3b6ea5", "#d98032", "#5a9e5a", "#b5514f", "#8265a7", "#7f7f7f", "#b59a3a", "#4aa3a3")


def line_chart(x: Sequence[float], y: Sequence[float], x_label: str, y_label: str) -> str:
    """A line with a dot per point."""
    frame = _Frame((min(x), max(x)), (min(0.0, *y), max(y)))
    points = [frame.place(a, b) for a, b in zip(x, y, strict=True)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{COLOURS[0]}"/>' for a, b in points)
    line = f'<polyline points="{path}" fill="none" stroke="{COLOURS[0]}" stroke-width="2"/>'
    return frame.svg(line + dots, x_label, y_label)


def dot_chart(x: Sequence[float], y: Sequence[float], x_label: str, y_label: str) -> str:
    """A dot per point; the x axis begins at 0."""
    frame = _Frame((min(0.0, *x), max(x)), (min(0.0, *y), max(y)))
    points = [frame.place(a, b) for a, b in zip(x, y, strict=True)]
    dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{COLOURS[0]}"/>' for a, b in points)
    return frame.svg(dots, x_label, y_label)


def line_charts(
    series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str, *, log_x: bool = False
) -> str:
    """Several lines of (x, y) points in one frame, with a legend below; `log_x` spaces x by powers of two."""
    placed = {name: [(math.log2(x) if log_x else x, y) for x, y in points] for name, points in series.items()}
    xs, ys = ([point[axis] for points in placed.values() for point in points] for axis in (0, 1))
    if not xs:
        return share_bar({})
    frame = _Frame((min(xs), max(xs)), (min(0.0, *ys), max(ys)))
    parts = []
    for index, (name, points) in enumerate(placed.items()):
        colour = COLOURS[index % len(COLOURS)]
        dash = ' stroke-dasharray="5 3"' if index >= len(COLOURS) else ""
        places = [frame.place(x, y) for x, y in points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
        row, column = divmod(index, 3)
        x, y = 10 + 180 * column, HEIGHT + 6 + 20 * row
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}">{escape(name)}</text>')
    ends = [f"{2**x if log_x else x:g}" for x in frame.x]
    return frame.svg("".join(parts), x_label, y_label, ends=ends, extra=10 + 20 * -(-len(placed) // 3))


def histogram(values: Sequence[float], bins: int, x_label: str, y_label: str) -> str:
    counts, edges = np.histogram(values, bins=bins)
    frame = _Frame((float(edges[0]), float(edges[-1])), (0.0, float(counts.max())))
    bars = []
    for count, left, right in zip(counts, edges, edges[1:], strict=False):
        (x0, top), (x1, bottom) = frame.place(float(left), float(count)), frame.place(float(right), 0.0)
        size = f'width="{max(x1 - x0 - 1, 1):.1f}" height="{bottom - top:.1f}"'
        bars.append(f'<rect x="{x0:.1f}" y="{top:.1f}" {size} fill="{COLOURS[0]}"/>')
    return frame.svg("".join(bars), x_label, y_label)


def share_bar(shares: dict[str, float]) -> str:
    """One bar cut by share, largest first, with a legend below."""
    total = sum(shares.values()) or 1.0
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    parts, left = [], 0.0
    for index, (name, share) in enumerate(ordered):
        width, colour = (WIDTH - 20) * share / total, COLOURS[index % len(COLOURS)]
        parts.append(f'<rect x="{10 + left:.1f}" y="10" width="{width:.1f}" height="34" fill="{colour}"/>')
        row, column = divmod(index, 3)
        x, y = 10 + 180 * column, 62 + 20 * row
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}">{escape(name)} {share / total:.1%}</text>')
        left += width
    height = 70 + 20 * -(-len(ordered) // 3)
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'


class _Frame:
    """Axes with their ranges; a range of no width is widened."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x = x if x[1] > x[0] else (x[0] - 0.5, x[0] + 0.5)
        self.y = y if y[1] > y[0] else (y[0], y[0] + 1.0)

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return MARGIN + across * (WIDTH - MARGIN - 12), HEIGHT - MARGIN - up * (HEIGHT - MARGIN - 12)

    def svg(
        self, content: str, x_label: str, y_label: str, *, ends: Sequence[str] | None = None, extra: int = 0
    ) -> str:
        """Axes around `content`; `ends` name the x range when it is not its numbers, `extra` is room for a legend."""
        bottom, right = HEIGHT - MARGIN, WIDTH - 12
        first, last = ends or [f"{end:g}" for end in self.x]
        axes = f'<path d="M{MARGIN},12 V{bottom} H{right}" fill="none" stroke="#888"/>'
        texts = [
            (MARGIN, bottom + 16, "start", first),
            (right, bottom + 16, "end", last),
            ((MARGIN + right) / 2, bottom + 32, "middle", x_label),
            (MARGIN - 6, bottom, "end", f"{self.y[0]:.3g}"),
            (MARGIN - 6, 20, "end", f"{self.y[1]:.3g}"),
            (MARGIN + 6, 22, "start", y_label),
        ]
        labels = "".join(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>' for x, y, anchor, text in texts
        )
        size = f'viewBox="0 0 {WIDTH} {HEIGHT + extra}" width="{WIDTH}"'
        return f'<svg {size} role="img">{axes}{content}{labels}</svg>'
