"""The page of `specrl bench plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.tables import markdown_table

MB = 1e6
INTRODUCTION = """
Each small run takes two steps of the train stage's parts on one rank, on random weights and sequences of full length:
generation, the policy's update, the drafter's, a refit, the guard's copy and a checkpoint. Counted are the bytes of all
tensors at every moment, by torch's profiler, and the weights that a CPU engine packs into memory of its own. Planned is
what `specrl run --dry-run` says of the train stage, without the interpreter and its libraries, which are no tensors.
"""


def write_page(job: BenchJob, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the page.

    Args:
        rows: A `MeasuredSize` each, as JSON.
    """
    page = Page(job.page)
    page.text(heading("the planned memory of a rank against what it takes", job.command, torch.get_num_threads()))
    page.text(INTRODUCTION)
    table = [
        (row["name"], row["how"], *(f"{value / MB:.1f}" for value in (row["planned"], row["peak"])), _error(row))
        for row in rows
    ]
    page.text(markdown_table(("run", "", ">planned, MB", ">measured, MB", ">planned more"), table))
    for row in rows:
        page.text(f"## {row['name']}")
        page.text(_phases(row))
        page.text(_items(row))
    page.write()


def _error(row: Mapping[str, Any]) -> str:
    return f"{row['planned'] / row['peak'] - 1:+.1%}"


def _phases(row: Mapping[str, Any]) -> str:
    """Return the table of what was measured."""
    cells = [(name, f"{phase['peak'] / MB:.1f}", f"{phase['held'] / MB:.1f}") for name, phase in row["phases"].items()]
    cells.append(("packed weights of the engine", "", f"{row['packed'] / MB:.1f}"))
    return markdown_table(("measured in", ">peak, MB", ">left behind, MB"), cells)


def _items(row: Mapping[str, Any]) -> str:
    """Return the table of what was planned."""
    cells = [
        (item["name"], f"{item['gib'] * 2**30 / MB:.1f}", item["phase"] or "the whole stage", item["how"])
        for item in row["items"]
    ]
    return markdown_table(("planned", ">MB", "in", "how"), cells)
