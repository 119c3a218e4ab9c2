"""The page of `specrl bench run`, made of its rows alone, so that rows of several jobs make one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from specrl.bench.pages import Page
from specrl.bench.tables import Spread, markdown_table
from specrl.report.plots import line_charts

SECONDS = {
    "step_s": "timing/step_s",
    "generation_s": "timing/generation_s",
    "policy_update_s": "timing/policy_update_s",
    "drafter_update_s": "timing/drafter_update_s",
    "refit_s": "timing/refit_s",
    "idle_s": "bubble/idle_s",
    "idle_used_s": "bubble/used_s",
}
"""Columns that are medians of the counted steps, in seconds."""
HOW = """
Every cell trains the run's policy before RL, with ranks, an engine and an optimizer of its own, on the same prompts
with the same seeds. Cells take a step each in turn, in another order in every round; while one works, the others wait. All
ratios are against **{baseline}** with the same seed, per response token, and above 1 where the cell is faster:
*generation* and *step* (without validations) are medians over the counted steps, with the least and the greatest ratio
of any step; *end to end* is the whole training, with the start of its ranks, all steps and their validations. The
pretraining of a drafter comes before it. *decoding steps* are engine iterations of the rank that needed the most, per
token, as a part of the baseline's; *same* is the share of responses with the baseline's tokens.
"""
Rows = Sequence[Mapping[str, Any]]


def write_page(path: Path, command: str, rows: Rows, failed: Mapping[str, str] | None = None) -> None:
    """Write the page.

    Args:
        failed: The errors of the cells that failed, by their labels.
    """
    page = Page(path)
    machines = "; ".join(dict.fromkeys(row["hardware"] for row in rows))
    page.text(f"# Whole trainings\n\nCommand: `{command}`. Date: {date.today().isoformat()}. Hardware: {machines}.")
    page.text(HOW.format(baseline=next(row["cell"] for row in rows if row["is_baseline"])))
    page.text(_speedups(rows))
    page.text("## What was learned\n\n" + _learned(rows))
    page.text("## Where the time of a step goes\n\nMedians of the counted steps, in seconds:\n\n" + _parts(rows))
    for column, title in (("reward_by_step", "mean reward"), ("acceptance_length_by_step", "acceptance length")):
        page.plot(column.removesuffix("_by_step"), _chart(rows, column, title), f"{title} by step, mean of the seeds")
    if failed:
        lines = [f"- {label}: {error}" for label, error in failed.items()]
        page.text("\n".join(["These cells failed; the same command tries them again:\n", *lines]))
    page.write()


def _names(row: Mapping[str, Any]) -> list[str]:
    return [str(row["cell"]), str(row.get("seed") or "")]


def _speedups(rows: Rows) -> str:
    lines = []
    for row in rows:
        spreads = [
            Spread(row[f"{name}_ratio"], row[f"{name}_min"], row[f"{name}_max"]) for name in ("generation", "step")
        ]
        cells = (*map(str, spreads), f"{row['end_to_end_ratio']:.2f}x", f"{row['decode_step_ratio']:.2f}")
        lines.append([*_names(row), *cells, f"{row['acceptance_length'] or 1:.2f}", f"{row['same_responses']:.1%}"])
    columns = (">generation", ">step", ">end to end", ">decoding steps", ">acceptance length", ">same")
    return markdown_table(("cell", ">seed", *columns), lines)


def _learned(rows: Rows) -> str:
    lines = []
    for row in rows:
        difference = f"{row['reward_difference']:+.4f} (p = {row['reward_p_value']:.2f})"
        numbers = (row["accuracy"], row["token_mult_prob_error"], row["kl"])
        forms = (".1%", ".4f", ".1e")
        shown = ["-" if value is None else f"{value:{form}}" for value, form in zip(numbers, forms, strict=True)]
        reward = "-" if row["is_baseline"] else difference
        lines.append([*_names(row), f"{row['reward_mean']:.3f}", reward, *shown])
    columns = (">mean reward", ">difference (paired, random signs)", ">accuracy", ">token_mult_prob_error", ">KL")
    return markdown_table(("cell", ">seed", *columns), lines)


def _parts(rows: Rows) -> str:
    lines = [[*_names(row), *(f"{row[name]:.2f}" for name in (*SECONDS, "start_s"))] for row in rows]
    titles = [f">{name.removesuffix('_s').replace('_', ' ')}" for name in (*SECONDS, "start_s")]
    return markdown_table(("cell", ">seed", *titles), lines)


def _chart(rows: Rows, column: str, title: str) -> str:
    series = {}
    for name in dict.fromkeys(row["cell"] for row in rows):
        curves = [row[column] for row in rows if row["cell"] == name]
        series[name] = [(float(step), fmean(values)) for step, values in enumerate(zip(*curves, strict=True))]
    return line_charts(series, "RL step", title)
