"""`specrl bench drafter`: measure, then write the rows and the page."""

from __future__ import annotations

import time

from specrl.bench.drafter.comparison import DrafterComparison
from specrl.bench.drafter.page import DrafterFindings, write_page
from specrl.bench.job import BenchJob
from specrl.bench.pages import write_rows
from specrl.bench.settings import DrafterSettings
from specrl.bench.subject import find_subject
from specrl.config import ConfigError
from specrl.distributed import join, leave


def main(job: BenchJob) -> None:
    """Run the comparison, and write the rows and the page.

    Raises:
        ConfigError: The run has no EAGLE-3 drafter.
    """
    started = time.monotonic()
    settings, subject = DrafterSettings.model_validate(job.settings), find_subject(job.run_dir)
    method = subject.config.speculation.draft_method
    if method.model != "drafter" or method.texts or subject.first_drafter_dir is None:
        raise ConfigError(f"run {job.run_dir.name} has no EAGLE-3 drafter to start from")
    ranks = join()
    comparison = DrafterComparison(subject, settings, ranks, job.run_dir / "bench" / "drafter")
    comparison.pretrain()
    counted = comparison.run()
    results = comparison.speedups()
    write_rows(job.json_path, [result.row() for result in results])
    found = DrafterFindings(results, counted, comparison.config, time.monotonic() - started)
    write_page(job, settings, found)
    comparison.engine.shutdown()
    comparison.rewards.close()
    leave()
