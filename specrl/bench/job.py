"""The process of a benchmark and its `BenchJob`: `python -m specrl.bench.job JOB.json PARENT`.

A benchmark is a package `specrl.bench.NAME` with `main.main(job) -> None`. It runs in a process of its own, as a
stage's rank does, because thread counts and devices are read once, when torch is loaded. This module imports nothing
heavy, since the command line imports it.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrl.artifacts import write_json
from specrl.bench.subject import Subject, find_subject
from specrl.processes import end_with_parent


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
    """The Markdown page; its charts lie beside it."""
    json_path: Path
    """The file to which the rows are written as JSON."""
    run_dir: Path | None = None
    """The finished run that is measured; None for a benchmark without one."""
    changes: tuple[str, ...] = ()
    """The run's settings that are measured with another value, `KEY=VALUE` each."""
    threads: int | None = None
    """The number of CPU threads of the process; if it is None, all cores that it may use or that its job asks for."""

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
        data = json.loads(path.read_text())
        paths = {key: Path(data[key]) for key in ("folder", "page", "json_path", "run_dir") if data[key] is not None}
        return cls(**{**data, **paths, "changes": tuple(data["changes"])})


def main(path: Path, parent: int) -> None:
    """Run the benchmark of a job file, and end with the parent process, which is the command or the job."""
    end_with_parent(parent)
    job = BenchJob.load(path)
    importlib.import_module(f"specrl.bench.{job.name}.main").main(job)


def say(text: str) -> None:
    """Print a line of progress, and flush it."""
    print(text, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
