"""`specrl bench agreement`: measure, then write the rows and the page."""

from __future__ import annotations

from specrl.artifacts import CalibrateResult
from specrl.bench.agreement.comparison import PRECISIONS, compare, sample, with_precision
from specrl.bench.agreement.page import write_page
from specrl.bench.job import BenchJob
from specrl.bench.pages import write_rows
from specrl.bench.settings import AgreementSettings
from specrl.config import ConfigError
from specrl.distributed import join, leave
from specrl.precision.recipe import load_recipe
from specrl.report.results import find_stages, finished
from specrl.stages.train import check_precision


def main(job: BenchJob) -> None:
    """Measure every pair of precisions, and write the rows and the page.

    Raises:
        ConfigError: The run has not calibrated or not trained yet.
        ValueError: This machine cannot compute its policy in FP8.
    """
    settings, subject = AgreementSettings.model_validate(job.settings), job.subject
    calibrated = finished(find_stages(job.run_dir), "calibrate", CalibrateResult)
    if calibrated is None:
        raise ConfigError(
            f"run {job.run_dir.name} has no calibration; continue it with: specrl resume {job.run_dir.name}"
        )
    ranks = join()
    recipe = load_recipe(calibrated.scales_path, subject.first_policy_dir, ranks)
    job.check_taken([with_precision(subject.config, precision) for precision in PRECISIONS])
    for precision in PRECISIONS:
        check_precision(with_precision(subject.config, precision), subject.first_policy_dir)
    sampled = {precision: sample(subject, precision, recipe, settings) for precision in PRECISIONS}
    pairs = [pair for precision in PRECISIONS for pair in compare(subject, precision, recipe, sampled, ranks)]
    write_rows(job.json_path, [pair.row() for pair in pairs])
    write_page(job, settings, recipe, pairs)
    leave()
