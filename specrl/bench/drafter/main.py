"""`specrl bench drafter`: measure, then write the rows and the page."""

from __future__ import annotations

import time

from specrl.bench.drafter import evaluation_page
from specrl.bench.drafter.comparison import DrafterComparison
from specrl.bench.drafter.evaluation import Evaluation
from specrl.bench.drafter.page import DrafterFindings, write_page
from specrl.bench.job import BenchJob
from specrl.bench.pages import write_rows
from specrl.bench.settings import DrafterSettings
from specrl.config import ConfigError
from specrl.distributed import join, leave


def main(job: BenchJob) -> None:
    """Measure drafters on a file of prompts, or compare those of a run over its RL steps; write rows and page.

    Raises:
        ConfigError: A folder or the file cannot be used, or the run has no EAGLE-3 drafter.
    """
    settings = DrafterSettings.model_validate(job.settings)
    if settings.evaluates:
        evaluate(job, settings)
    else:
        compare(job, settings)


def evaluate(job: BenchJob, settings: DrafterSettings) -> None:
    """Measure any drafters on a file of prompts."""
    started = time.monotonic()
    join()
    evaluation = Evaluation(settings, job.folder)
    cells = evaluation.measure()
    write_rows(job.json_path, [cell.row() for cell in cells])
    evaluation_page.write_page(job, evaluation, cells, time.monotonic() - started)
    evaluation.shutdown()
    leave()


def compare(job: BenchJob, settings: DrafterSettings) -> None:
    """Compare EAGLE-3 drafters over the RL steps of a finished run."""
    started = time.monotonic()
    subject = job.subject
    method = subject.config.speculation.draft_method
    if method.model != "drafter" or method.texts or subject.first_drafter_dir is None:
        raise ConfigError(f"run {job.run_dir.name} has no EAGLE-3 drafter to start from")
    ranks = join()
    comparison = DrafterComparison(subject, settings, ranks, job.folder)
    job.check_taken([comparison.config])
    comparison.pretrain()
    counted = comparison.run()
    results = comparison.speedups()
    write_rows(job.json_path, [row for result in results for row in result.rows(comparison.config)])
    found = DrafterFindings(results, counted, comparison.config, time.monotonic() - started)
    write_page(job, settings, found)
    comparison.engine.shutdown()
    comparison.rewards.close()
    leave()
