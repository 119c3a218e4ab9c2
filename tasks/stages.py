"""One task per stage, named after it, which finishes the stage after those that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from specrl.config import STAGES, StageName
from tasks.run import Run, run_stage


def _task_of(stage: StageName) -> Any:
    @task(name=stage, task_run_name=stage, cache_policy=NO_CACHE)
    def finish(run: Run, *_inputs: Path) -> Path:  # Prefect draws dependencies from the inputs
        return run_stage(run, stage)

    return finish


prepare, pretrain, calibrate, train, validate, export = map(_task_of, STAGES)
