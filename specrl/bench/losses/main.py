"""`specrl bench losses`: measure, then write the rows and the page."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from specrl.bench.job import BenchJob
from specrl.bench.losses.comparison import LossComparison
from specrl.bench.losses.page import write_page
from specrl.bench.pages import write_rows
from specrl.bench.settings import LossSettings
from specrl.distributed import join, leave


def main(job: BenchJob) -> None:
    """Train and measure each variant with each seed, and write the rows and the page."""
    started = time.monotonic()
    settings, subject = LossSettings.model_validate(job.settings), job.subject
    with TemporaryDirectory(prefix="losses-") as folder:
        comparison = LossComparison(subject, settings, join(), Path(folder))
        job.check_taken([comparison.config])
        results = [result for seed in settings.seeds for result in comparison.run(seed)]
        write_rows(job.json_path, [row for result in results for row in result.rows(comparison.config)])
        write_page(job, settings, results, comparison.config, time.monotonic() - started)
        comparison.shutdown()
    leave()
