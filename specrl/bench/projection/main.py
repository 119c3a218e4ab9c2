"""`specrl bench projection`: simulate published settings and some configurations, and write the rows and the page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from specrl.bench.job import BenchJob, say
from specrl.bench.pages import write_rows
from specrl.bench.projection.page import ProjectedConfig, write_page
from specrl.bench.settings import ProjectionSettings
from specrl.config import load_config
from specrl.projection.simulator.choices import ACCEPTANCE, choices, hardware_of, model_of
from specrl.projection.simulator.published import plain_rows, published_rows


def main(job: BenchJob) -> None:
    """Simulate everything, and write the rows and the page."""
    settings = ProjectionSettings.model_validate(job.settings)
    published = published_rows()
    write_rows(job.json_path, [asdict(row) for row in published])
    projected = []
    for path in settings.configs:
        config = load_config(Path(path))
        model = model_of(config, hardware_of(config, None))
        projected.append(ProjectedConfig(config.name, config.train.num_steps, model, choices(model, ACCEPTANCE)))
        say(f"{config.name}: {model.gpus} {model.hardware.name}")
    write_page(job, plain_rows(), published, projected)
