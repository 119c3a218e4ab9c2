"""The process of a benchmark and its `BenchJob`: `python -m specrl.bench.job JOB.json PARENT`.

A benchmark is a package `specrl.bench.NAME` with `main.main(job) -> None`. It runs in a process of its own, as a
stage's rank does, because thread counts and devices are read once, when torch is loaded. This module imports nothing
heavy, since the command line imports it.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

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


def say(text: str) -> None:
    """Print a line of progress, and flush it."""
    print(text, flush=True)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))  # the command or the job
    own = BenchJob.load(Path(sys.argv[1]))
    importlib.import_module(f"specrl.bench.{own.name}.main").main(own)
