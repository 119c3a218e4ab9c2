"""The page of `specrl bench growth`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specrl.bench.growth.fit import NOTHING_S, Growth, PointTimes
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.tables import markdown_table

INTRODUCTION = """
Along each series one size of a step grows and nothing else. Every point is the train stage's own loop on random weights
whose responses all have the full length, in BF16 with plain decoding, with one thread for each rank; the seconds are
those of the fastest step after the warm-up. Beside them stands the arithmetic: matrix products, attention among them,
and what is read of weights and of the KV cache, at the rates that this machine reached just before. It leaves out
everything else, so that at small sizes the measured times grow more slowly, as constants prevail. It counts a prompt
for each of its responses, although up to eight share one in training and in the cache.
An exponent of 1 means twice the time at twice the size. A part that grows faster than its arithmetic is in bold; times
below 0.05 s are not judged.
"""


def write_page(job: BenchJob, times: Mapping[str, Sequence[PointTimes]], found: Sequence[Growth]) -> None:
    """Write the page.

    Args:
        times: The points of each series in the order of their sizes.
        found: How each part grows.
    """
    page = Page(job.page)
    page.text(heading("how the cost of a step grows", job.command, 1))
    page.text(INTRODUCTION)
    fast = [item for item in found if item.too_fast]
    words = ", ".join(f"{item.part.replace('_', ' ')} with {item.series}" for item in fast)
    page.text(f"Grows faster than its arithmetic: {words}." if fast else "Nothing grows faster than its arithmetic.")
    for name, points in times.items():
        page.text(f"## {name[0].upper()}{name[1:]}\n\n{_times(name, points)}")
        if own := [item for item in found if item.series == name]:
            page.text(_exponents(own))
    page.write()


def _times(name: str, points: Sequence[PointTimes]) -> str:
    """Return the table of seconds by size, each beside its arithmetic."""
    parts = [part for part, seconds in points[-1].seconds.items() if seconds > NOTHING_S]
    rows = [
        (f"{item.size:.3g}" if item.size > 1e5 else f"{item.size:g}", *(_cell(item, part) for part in parts))
        for item in points
    ]
    columns = (f">{name}", *(f">{part.replace('_', ' ')}, s (arithmetic)" for part in parts))
    return f"{points[-1].point.words} at the largest.\n\n" + markdown_table(columns, rows)


def _cell(item: PointTimes, part: str) -> str:
    least = f" ({item.least[part]:.2f})" if part in item.least else ""
    return f"{item.seconds.get(part, 0.0):.2f}{least}"


def _exponents(found: Sequence[Growth]) -> str:
    """Return the table of exponents."""
    rows = [
        (
            item.part.replace("_", " "),
            f"{item.measured:.2f}",
            f"**{item.last:.2f}**" if item.too_fast else f"{item.last:.2f}",
            "-" if item.least is None else f"{item.least:.2f}",
        )
        for item in found
    ]
    return markdown_table(("part", ">exponent", ">of the two largest sizes", ">of their arithmetic"), rows)
