"""The page of `specrl bench checkpoints`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.tables import Spread, markdown_table


@dataclass(frozen=True)
class CheckpointCosts:
    """What one checkpoint cost, in seconds."""

    size: int
    """The bytes of its safetensors files."""
    save_s: float
    """How long a step waits: the state is copied into host memory."""
    blocking_s: float
    """How long a step would wait for a checkpoint that is written at once, copy included."""
    work_alone_s: float
    """How long some forward passes take while nothing is written."""
    work_beside_s: float
    """How long the same forward passes take from the moment at which the writing begins."""
    load_s: float
    """How long a start takes to verify the checkpoint and to read it."""


def write_page(job: BenchJob, costs: Sequence[CheckpointCosts], step_seconds: float) -> None:
    """Write the page.

    Args:
        step_seconds: The median time of a step of the run.
    """
    save = Spread.of([cost.save_s for cost in costs])
    lines = [
        ("the step waits for the copy", save),
        ("it would wait for a checkpoint written at once", Spread.of([cost.blocking_s for cost in costs])),
        ("forward passes alone", Spread.of([cost.work_alone_s for cost in costs])),
        ("the same, with a checkpoint written beside them", Spread.of([cost.work_beside_s for cost in costs])),
        ("a start verifies and reads it", Spread.of([cost.load_s for cost in costs])),
    ]
    page = Page(job.page)
    page.text(heading("what checkpoints cost", job.command, torch.get_num_threads()))
    page.text(
        f"Policy of run `{job.run_dir.name}` with masters and moments on one rank, {costs[0].size / 1e9:.2f} GB; "
        f"{len(costs)} rounds, in each of which everything is measured once."
    )
    rows = [[name, *(f"{value:.2f}" for value in (row.median, row.least, row.greatest))] for name, row in lines]
    page.text(markdown_table(("", ">median, s", ">least", ">greatest"), rows))
    page.text(
        f"A step of this run takes {step_seconds:.1f} s (median): waiting for the copy is "
        f"{save.median / step_seconds:.2%} of it."
    )
    page.write()
