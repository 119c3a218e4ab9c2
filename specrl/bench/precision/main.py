"""`specrl bench precision`: run every setting with every seed, then write the rows and the page."""

from __future__ import annotations

from specrl.bench.job import BenchJob
from specrl.bench.pages import write_rows
from specrl.bench.precision.page import write_page
from specrl.bench.precision.runs import check, folders_of, measure
from specrl.bench.settings import PrecisionSettings


def main(job: BenchJob) -> None:
    """Run every setting with every seed, and write the rows and the page."""
    settings = PrecisionSettings.model_validate(job.settings)
    folder = job.folder
    calibrated, max_kl = check(job)
    found = []
    for seed in settings.seeds:
        for setting, place in folders_of(settings).items():
            found.append(measure(job, folder / f"{place}-seed-{seed}", setting, seed, settings))
            write_rows(job.json_path, [item.row() for item in found])  # what is measured stays if the next one fails
    write_page(job, settings, found, calibrated, max_kl)
