"""The process of a benchmark and its `BenchJob`: `python -m specrl.bench.job JOB.json PARENT`, or a cluster's job.

A benchmark is a package `specrl.bench.NAME` with `main.main(job) -> None`. It runs in a process of its own, as a
stage's rank does, because thread counts and devices are read once, when torch is loaded. This module imports nothing
heavy, since the command line imports it.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from specrl.artifacts import Artifact, write_json, write_result
from specrl.bench.subject import Subject, find_subject
from specrl.context import StageContext
from specrl.processes import end_with_parent

ENTRY = "specrl.bench.job:main"
"""The function of a cluster's job that runs a benchmark."""
JOB_FILE, PAGE_FILE = "job.json", "page.md"
"""The files in the folder of such a job's results: what to run, and the page, with the rows beside it."""
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables of a job's rank, which a benchmark must not take for those of its own ranks."""


class BenchResult(Artifact):
    """The result of a job that runs a benchmark."""

    seconds: float


@dataclass(frozen=True)
class BenchJob:
    """The work of a benchmark's process."""

    name: str
    options: dict[str, Any]
    """The fields of the benchmark's class in `specrl/bench/options.py`."""
    command: str
    """The command line that the page shows."""
    folder: Path
    """The folder of what it leaves beside page and rows."""
    page: Path
    run_dir: Path | None = None
    """The finished run that is measured; None for a benchmark without one."""
    changes: tuple[str, ...] = ()
    """The run's settings that are measured with another value, `KEY=VALUE` each."""

    @property
    def json_path(self) -> Path:
        """The rows, beside the page."""
        return self.page.with_suffix(".json")

    @property
    def subject(self) -> Subject:
        """The finished run that is measured, with the changes."""
        assert self.run_dir is not None
        return find_subject(self.run_dir, self.changes)

    def save(self, path: Path) -> None:
        """Write the job as JSON."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> BenchJob:
        """Read a job that `save` wrote."""
        return TypeAdapter(cls).validate_json(path.read_bytes())

    def run(self) -> None:
        """Measure, in this process."""
        importlib.import_module(f"specrl.bench.{self.name}.main").main(self)


def main(context: StageContext) -> None:
    """Run the benchmark whose `job.json` lies in the folder of results of a cluster's job; write `result.json` last."""
    started = time.monotonic()
    for name in OF_RANKS:
        os.environ.pop(name, None)
    BenchJob.load(context.stage_dir / JOB_FILE).run()
    write_result(context.stage_dir, BenchResult(seconds=time.monotonic() - started))


def say(text: str) -> None:
    """Print a line of progress, and flush it."""
    print(text, flush=True)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    BenchJob.load(Path(sys.argv[1])).run()
