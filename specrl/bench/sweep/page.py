"""The page of a sweep: its rows side by side, a chart along each dimension with numbers, and what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from specrl.bench.pages import Page
from specrl.bench.tables import markdown_table
from specrl.bench.uses import PLAIN
from specrl.report.plots import line_charts

WHAT = """
Each row is a training of its own beside plain decoding in the same precision, measured by `specrl bench run`: step by
step in turn, on the same machine, with the same prompts and seeds. Ratios are per response token, and above 1 where it
is faster than plain decoding; *step* has the least and the greatest ratio of any step in brackets.
"""
RATIOS = ("generation_ratio", "step_ratio", "end_to_end_ratio")


@dataclass(frozen=True)
class SweptCell:
    """Where the rows of a combination come from."""

    label: str
    key: str
    """The name of its folder in `RUN/bench/cells/stages`, which has its own page, and MLflow's tag `specrl.key`."""
    job_id: str | None
    seconds: float
    cached: bool
    """Whether an earlier call of a sweep has measured it."""


def write_sweep_page(
    path: Path,
    command: str,
    dimensions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    cells: Sequence[SweptCell],
    failed: Mapping[str, str],
) -> None:
    """Write the page.

    Args:
        dimensions: The columns of the rows that say which combination of the grid a row belongs to.
        rows: The rows of all combinations, without those of plain decoding.
        cells: The combinations that have been measured.
        failed: The errors of the combinations that failed, by their labels.
    """
    page = Page(path)
    page.text(f"# {date.today().isoformat()}: a sweep over whole trainings\n\nCommand: `{command}`.")
    page.text("".join(f"Hardware: {machine}.\n" for machine in dict.fromkeys(row["hardware"] for row in rows)))
    page.text(WHAT)
    page.text(_table(dimensions, rows))
    for dimension in dimensions:
        series = series_along(dimension, dimensions, rows)
        if series:
            chart = line_charts(series, dimension, "step, times as fast as plain decoding")
            page.plot(dimension, chart, f"Speedup of a step by {dimension}")
    page.text(_origins(cells))
    if failed:
        lines = [f"- {label}: {error}" for label, error in failed.items()]
        page.text("\n".join(["These combinations failed; the same command tries them again:\n", *lines]))
    page.write()


def without_plain(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of all uses but plain decoding."""
    return [row for row in rows if row["use"] != PLAIN]


def _table(dimensions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        generation, step, end_to_end = (f"{row[name]:.2f}x" for name in RATIOS)
        joules = row.get("joules_per_token")
        cells = (
            generation,
            f"{step} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})",
            end_to_end,
            f"{row['same_responses']:.0%}",
            f"{row['reward_difference']:+.4f} (p = {row['reward_p_value']:.2f})",
            f"{row['reserved_hours_per_million_tokens']:.2f}",
            "not measured" if joules is None else f"{joules:.3f}",
        )
        lines.append([*(str(row[name]) for name in dimensions), *cells])
    columns = (">generation", ">step", ">end to end", ">same responses", ">reward against plain")
    return markdown_table((*dimensions, *columns, ">hours held per million tokens", ">J per token"), lines)


def _origins(cells: Sequence[SweptCell]) -> str:
    lines = [
        [
            cell.label,
            cell.job_id or "",
            f"{cell.seconds / 60:.1f}",
            "earlier" if cell.cached else "this",
            f"`{cell.key}`",
        ]
        for cell in cells
    ]
    return markdown_table(("combination", ">job", ">minutes", "measured by which call", "key"), lines)


def series_along(
    dimension: str, dimensions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[tuple[float, float]]]:
    """Return (value, speedup of a step) along a dimension of numbers, one line for each combination of the others.

    It is empty for a dimension without at least two numbers.
    """
    values = {row[dimension] for row in rows}
    if len(values) < 2 or not all(isinstance(value, int | float) for value in values):
        return {}
    varied = [name for name in dimensions if name != dimension and len({row[name] for row in rows}) > 1]
    series: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: float(row[dimension])):
        label = " ".join(str(row[name]) for name in varied)
        series.setdefault(label, []).append((float(row[dimension]), row["step_ratio"]))
    return series
