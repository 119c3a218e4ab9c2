"""Three small stages through the real tasks, submission and jobs: `python -m tests.slurm.dummy_flow RUN_DIR`.

`detached` is such a flow as a job: of one stage, and without Prefect.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from rich.console import Console

from flows.pipeline import cancel
from flows.server import mark_crashed_flows
from slurm.backend import JobError, StoppedError
from specrl.config import StageName
from specrl.context import StageContext
from tasks.detached import EXIT_STOPPED, IN_JOB, run_flow
from tasks.display import Reporter
from tasks.run import Run, open_run, run_stage

ENTRY = "tests.slurm.dummy_stage:main"


@task(cache_policy=NO_CACHE, task_run_name="{stage}")
def stage_task(run: Run, stage: StageName, *inputs: Path) -> Path:
    return run_stage(run, stage, entry=ENTRY)


@flow(name="dummy", flow_run_name="{run_dir}", validate_parameters=False, on_cancellation=[cancel])
def dummy(run_dir: str) -> None:
    run = open_run(Path(run_dir), Reporter(Console(soft_wrap=True)))
    policy = stage_task(run, "prepare")
    drafter = stage_task(run, "pretrain", policy)
    stage_task(run, "calibrate", policy, drafter)


def detached(context: StageContext) -> None:
    run_flow(context, [sys.executable, "-m", "tests.slurm.dummy_flow", str(context.run_dir)])


def one_stage(run_dir: Path) -> None:
    try:
        run_stage(open_run(run_dir, Reporter(Console(soft_wrap=True))), "prepare", entry=ENTRY)
    except StoppedError:
        sys.exit(EXIT_STOPPED)


if __name__ == "__main__":
    if IN_JOB in os.environ:
        one_stage(Path(sys.argv[1]))
        sys.exit()
    try:
        mark_crashed_flows(Path(sys.argv[1]))
        dummy(sys.argv[1])
    except JobError as error:
        print(error, flush=True)
        sys.exit(1)
