"""`specrl bench projection`: simulate published settings, beside the configurations that `specrl project` simulates."""

from __future__ import annotations

from pathlib import Path

from specrl.bench.job import BenchJob, say
from specrl.bench.pages import Page, write_rows
from specrl.bench.settings import ProjectionSettings
from specrl.config import load_config
from specrl.projection.simulator.choices import hardware_of
from specrl.projection.simulator.published import published_rows


def main(job: BenchJob) -> None:
    """Simulate everything, and write the rows and the page."""
    for path in ProjectionSettings.model_validate(job.settings).configs:
        say(f"{path}: {hardware_of(load_config(Path(path)), None).name}")
    write_rows(job.json_path, [row.as_json() for row in published_rows()])
    page = Page(job.page)
    page.text("`specrl project` prints this.")
    page.write()
