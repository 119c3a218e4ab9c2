"""The process of a benchmark and its `BenchJob`: `python -m specrl.bench.job JOB.json PARENT`, or a job on a cluster.

A benchmark is a package `specrl.bench.NAME` with `main.main(job, options)`. It runs in its own process, because torch
reads thread counts and devices once, when it is loaded. The command line imports this module, which therefore imports
nothing heavy.
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
from specrl.bench.options import OPTIONS
from specrl.bench.subject import Subject, find_subject
from specrl.context import StageContext
from specrl.processes import OF_RANKS, end_with_parent

ENTRY = "specrl.bench.job:main"  # called by a job on a cluster
JOB_FILE, PAGE_FILE = "job.json", "page.md"  # in the folder of results


class BenchResult(Artifact):
    seconds: float


@dataclass(frozen=True)
class BenchJob:
    name: str
    options: dict[str, Any]  # the fields of the benchmark's class in `OPTIONS`
    command: str  # the command line, for the page
    folder: Path  # for files other than page and rows
    page: Path
    run_dir: Path | None = None  # the finished run that is measured, if any
    changes: tuple[str, ...] = ()  # `KEY=VALUE`, settings of the run that are changed for the benchmark

    @property
    def json_path(self) -> Path:
        return self.page.with_suffix(".json")

    @property
    def subject(self) -> Subject:
        assert self.run_dir is not None
        return find_subject(self.run_dir, self.changes)

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> BenchJob:
        return TypeAdapter(cls).validate_json(path.read_bytes())

    def run(self) -> None:
        options: Any = TypeAdapter(OPTIONS[self.name]).validate_python(self.options)
        importlib.import_module(f"specrl.bench.{self.name}.main").main(self, options)


def main(context: StageContext) -> None:
    """Run the benchmark that `job.json` in a cluster job's folder of results describes; write `result.json` last."""
    started = time.monotonic()
    for name in OF_RANKS:
        os.environ.pop(name, None)
    BenchJob.load(context.stage_dir / JOB_FILE).run()
    write_result(context.stage_dir, BenchResult(seconds=time.monotonic() - started))


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    BenchJob.load(Path(sys.argv[1])).run()
