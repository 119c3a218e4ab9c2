"""The process of a benchmark and its `BenchJob`: `python -m specrl.bench.job JOB.json PARENT`.

A benchmark is a module with `main(job) -> None`. It runs in a process of its own, as a stage's rank does, because
thread counts and devices are read once, when torch is loaded. This module imports nothing heavy, since the command line
imports it.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrl.artifacts import write_json
from specrl.processes import end_with_parent


@dataclass(frozen=True)
class BenchJob:
    """The work of a benchmark's process."""

    entry: str
    """The function that does the work, as `module:function`."""
    run_dir: Path
    """The finished run whose policy and drafter are measured."""
    settings: dict[str, Any]
    """The settings of the benchmark, dumped from its model in `specrl/bench/settings.py`."""
    command: str
    """The command line that the page shows."""
    page: Path
    """The Markdown page; its charts lie beside it."""
    json_path: Path
    """The file to which the rows are written as JSON."""
    threads: int | None = None
    """The number of CPU threads of the process; if it is None, all cores that it may use or that its job asks for."""
    work_dir: Path | None = None
    """The folder of what it leaves beside page and rows; `bench/NAME` in the run's folder if it is None."""

    @property
    def name(self) -> str:
        """The name of the benchmark, which is that of its package."""
        return self.entry.split(".")[2]

    @property
    def folder(self) -> Path:
        """The folder that the benchmark works in."""
        return self.work_dir or self.run_dir / "bench" / self.name

    def save(self, path: Path) -> None:
        """Write the job as JSON."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> BenchJob:
        """Return the job that was written as JSON."""
        data = json.loads(path.read_text())
        paths = {key: Path(data[key]) for key in ("run_dir", "page", "json_path", "work_dir") if data[key] is not None}
        return cls(**{**data, **paths})


def main(path: Path, parent: int) -> None:
    """Run the benchmark of a job file, and end with the parent process.

    Args:
        path: The job file.
        parent: The process id of the parent, which is the command.
    """
    end_with_parent(parent)
    job = BenchJob.load(path)
    module, _, function = job.entry.partition(":")
    getattr(importlib.import_module(module), function)(job)


def say(text: str) -> None:
    """Print a line of progress, and flush it."""
    print(text, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
