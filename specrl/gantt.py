"""A step as a picture: one row per rank, a box per span of work, waiting left blank. Inline SVG, no other files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from specrl.timeline import GENERATION, PREGENERATION, SPOT_TRAINING, RankTimeline

COLOURS = {
    GENERATION: "#3b6ea5",
    PREGENERATION: "#8fb8de",
    SPOT_TRAINING: "#d98032",
    "logprob": "#b59a3a",
    "policy_update": "#5a9e5a",
    "drafter_update": "#e3b07a",
    "refit": "#8265a7",
    "checkpoint": "#b5514f",
}
"""Spans of other names are not drawn."""
WIDTH, LEFT, ROW, BOX = 900, 60, 24, 16


def gantt(ranks: Sequence[RankTimeline]) -> str:
    """Seconds from the first rank's start, to scale."""
    drawn = [[span for span in rank.spans if span.name in COLOURS] for rank in ranks]
    start = min(span.started_at for row in drawn for span in row)
    end = max(span.ended_at for row in drawn for span in row)
    scale = (WIDTH - LEFT - 10) / max(end - start, 1e-9)
    parts = []
    for number, row in enumerate(drawn):
        top = 10 + ROW * number
        parts.append(f'<text x="{LEFT - 8}" y="{top + 12}" text-anchor="end">rank {ranks[number].bubble.rank}</text>')
        for span in row:
            left, width = LEFT + (span.started_at - start) * scale, (span.ended_at - span.started_at) * scale
            title = f"{span.name}: {span.started_at - start:.2f} to {span.ended_at - start:.2f} s"
            box = f'x="{left:.1f}" y="{top}" width="{max(width, 0.5):.1f}" height="{BOX}"'
            parts.append(f'<rect {box} fill="{COLOURS[span.name]}"><title>{escape(title)}</title></rect>')
    bottom = 10 + ROW * len(ranks)
    parts.append(f'<path d="M{LEFT},{bottom} H{WIDTH - 10}" stroke="#888"/>')
    parts.append(f'<text x="{LEFT}" y="{bottom + 14}">0 s</text>')
    parts.append(f'<text x="{WIDTH - 10}" y="{bottom + 14}" text-anchor="end">{end - start:.1f} s</text>')
    names = [name for name in COLOURS if any(span.name == name for row in drawn for span in row)]
    for place, name in enumerate(names):
        x, y = LEFT + 205 * (place % 4), bottom + 26 + 18 * (place // 4)
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}">{escape(name.replace("_", " "))}</text>')
    height = bottom + 30 + 18 * -(-len(names) // 4)
    style = "<style>text{font:12px system-ui,sans-serif;fill:#444}</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">'
        f"{style}{''.join(parts)}</svg>\n"
    )
