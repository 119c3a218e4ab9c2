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

from specrl.artifacts import PROMPTS_DIR, RESULT_FILE, PrepareResult, TrainResult, write_json
from specrl.bench.options import OPTIONS
from specrl.config import Config, StageName, change_config
from specrl.context import StageContext
from specrl.processes import OF_RANKS, end_with_parent
from specrl.report.results import find_stages, read_config, result_of

ENTRY = "specrl.bench.job:main"  # called by a job on a cluster
JOB_FILE, PAGE_FILE = "job.json", "page.md"  # in the folder of results


@dataclass(frozen=True)
class Subject:
    """A finished run, before and after its RL steps."""

    config: Config
    policy_dir: Path  # after the RL steps
    drafter_dir: Path | None  # after the RL steps
    first_policy_dir: Path  # before the RL steps
    stages: dict[StageName, Path]  # the finished stages before the RL steps

    @property
    def prompts_dir(self) -> Path:
        """The folder of prompts that `prepare` started."""
        return self.stages["prepare"] / PROMPTS_DIR


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
        """The measured run, with the changed settings; a ConfigError if it has not finished."""
        assert self.run_dir is not None
        trained = result_of(self.run_dir, "train", TrainResult)
        before: tuple[StageName, ...] = ("prepare", "pretrain", "calibrate")
        stages = find_stages(self.run_dir)
        return Subject(
            config=change_config(read_config(self.run_dir), list(self.changes)),
            policy_dir=trained.policy_dir,
            drafter_dir=trained.drafter_dir,
            first_policy_dir=result_of(self.run_dir, "prepare", PrepareResult).policy_dir,
            stages={name: stages[name] for name in before if name in stages and (stages[name] / RESULT_FILE).exists()},
        )

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
    write_json(context.stage_dir / RESULT_FILE, {"seconds": time.monotonic() - started})


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    BenchJob.load(Path(sys.argv[1])).run()
