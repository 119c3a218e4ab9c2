"""`specrl bench plan`: measure the small runs one after another, then write the rows and the page."""

from __future__ import annotations

from specrl.bench.job import BenchJob, say
from specrl.bench.pages import write_rows
from specrl.bench.plan.measure import measure, warm_up
from specrl.bench.plan.page import write_page
from specrl.bench.plan.sizes import SIZES
from specrl.distributed import leave


def main(job: BenchJob) -> None:
    """Measure every small run, and write the rows and the page."""
    warm_up(SIZES[0], job.run_dir / "warm-up")
    rows = []
    for index, size in enumerate(SIZES):
        row = measure(size, job.run_dir / f"size-{index}").as_json()
        say(f"{size.name}: planned {row['planned'] / 1e6:.0f} MB, measured {row['peak'] / 1e6:.0f} MB")
        rows.append(row)
    write_rows(job.json_path, rows)
    write_page(job, rows)
    leave()
