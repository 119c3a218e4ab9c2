"""The process of a benchmark and its `BenchJob`: `python -m specrl.bench.job JOB.json PARENT`.

A benchmark is a module with `main(job) -> None`. It runs in a process of its own, as a stage's rank does, because
thread counts and devices are read once, when torch is loaded. This module imports nothing heavy, since the command line
imports it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrl.artifacts import digest, write_json
from specrl.bench.subject import Subject, changed_config, check_taken, find_subject
from specrl.config import Config
from specrl.processes import end_with_parent
from specrl.report.results import read_config


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
    """The folder of what it leaves beside page and rows; `bench/NAME` in the run's folder if it is None, or with
    changes `bench/NAME-DIGEST`."""
    changes: tuple[str, ...] = ()
    """The run's settings that are measured with another value, `KEY=VALUE` each."""

    @property
    def name(self) -> str:
        """The name of the benchmark, which is that of its package."""
        return self.entry.split(".")[2]

    @property
    def folder(self) -> Path:
        """The folder that the benchmark works in."""
        own = f"{self.name}-{digest(self.changes)}" if self.changes else self.name
        return self.work_dir or self.run_dir / "bench" / own

    @property
    def config(self) -> Config:
        """The configuration of the run, with the changes."""
        return changed_config(read_config(self.run_dir), self.changes)

    @property
    def subject(self) -> Subject:
        """The finished run that is measured, with the changes."""
        return find_subject(self.run_dir, self.changes)

    def check_taken(self, measured: Sequence[Config]) -> None:
        """Check that these configurations, which the benchmark measures, have the changes.

        Raises:
            ConfigError: The benchmark sets itself what was to be changed.
        """
        if self.changes:
            check_taken(self.config, self.changes, measured)

    def save(self, path: Path) -> None:
        """Write the job as JSON."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> BenchJob:
        """Return the job that was written as JSON."""
        data = json.loads(path.read_text())
        paths = {key: Path(data[key]) for key in ("run_dir", "page", "json_path", "work_dir") if data[key] is not None}
        return cls(**{**data, **paths, "changes": tuple(data["changes"])})


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
