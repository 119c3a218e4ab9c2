"""`specrl bench plan`: measure the small runs one after another, then write the rows and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from specrl.bench.job import BenchJob, say
from specrl.bench.pages import write_rows
from specrl.bench.plan.one_size import RESULT
from specrl.bench.plan.page import write_page
from specrl.bench.plan.sizes import SIZES


def main(job: BenchJob) -> None:
    """Measure every small run in a process of its own, and write the rows and the page."""
    rows = []
    for index, size in enumerate(SIZES):
        rows.append(measure_alone(index, job.run_dir))
        say(f"{size.name}: planned {rows[-1]['planned'] / 1e6:.0f} MB, measured {rows[-1]['peak'] / 1e6:.0f} MB")
    write_rows(job.json_path, rows)
    write_page(job, rows)


def measure_alone(index: int, parent_dir: Path) -> dict[str, Any]:
    """Return what a process of its own measured of one of `SIZES`, as JSON.

    Args:
        parent_dir: The folder in which the run gets a folder of its own.
    """
    folder = parent_dir / f"size-{index}"
    folder.mkdir()
    process = [sys.executable, "-m", "specrl.bench.plan.one_size", str(index), str(folder), str(os.getpid())]
    subprocess.run(process, check=True)
    found: dict[str, Any] = json.loads((folder / RESULT).read_text())
    return found
