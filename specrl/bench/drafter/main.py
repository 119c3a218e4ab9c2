"""`specrl bench drafter`: measure, then write the rows and the page."""

from __future__ import annotations

from functools import partial
from typing import Any

from specrl.bench.drafter.evaluation import Evaluation
from specrl.bench.drafter.initial import cells_of, make_drafters
from specrl.bench.drafter.page import write_page
from specrl.bench.job import BenchJob
from specrl.bench.options import DrafterOptions, RunOptions
from specrl.bench.pages import write_rows
from specrl.bench.run.main import train_cells
from specrl.distributed import join, leave


def main(job: BenchJob) -> None:
    """Measure drafters on a file of prompts, or those of a run over its RL steps; write rows and page.

    Raises:
        ConfigError: A folder or the file cannot be used.
    """
    options = DrafterOptions.load(job.options)
    ranks = join()
    if job.run_dir is None:
        evaluation = Evaluation(options, job.folder)
        evaluation.measure(partial(save, job, evaluation))
        evaluation.shutdown()
        leave()
        return
    subject = job.subject
    drafters = make_drafters(subject, options, ranks, job.folder / "initial")
    leave()
    train_cells(job, RunOptions(cells_of(drafters), options.steps, 1, 3, 0), subject)


def save(job: BenchJob, evaluation: Evaluation, rows: list[dict[str, Any]]) -> None:
    """Write rows and page."""
    write_rows(job.json_path, rows)
    write_page(job, evaluation, rows)
