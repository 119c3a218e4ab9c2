"""`specrl bench bubbles`: run every setting, then write the rows and the page."""

from __future__ import annotations

from typing import Any

from specrl.bench.bubbles.page import write_page
from specrl.bench.bubbles.runs import SettingRun, make_context, row, run_setting
from specrl.bench.job import BenchJob
from specrl.bench.pages import write_rows
from specrl.bench.settings import BubbleSettings


def main(job: BenchJob) -> None:
    """Run every setting, and write the rows and the page."""
    settings = BubbleSettings.model_validate(job.settings)
    folder = job.folder
    # All contexts are made before the first run, so that what cannot work is refused at once and not after an hour.
    names = ("plain", *settings.uses)
    contexts = {name: make_context(job, folder / name, name, settings) for name in names}
    job.check_taken([context.config for context in contexts.values()])
    runs: dict[str, SettingRun] = {}
    rows: list[dict[str, Any]] = []
    for name, context in contexts.items():
        runs[name] = run_setting(context, folder / name, name, settings)
        rows = [row(run, runs["plain"]) for run in runs.values() if run.name != "plain"]
        write_rows(job.json_path, rows)  # what is measured stays if the next setting fails
    write_page(job, settings, rows, runs)
