"""What the tasks of a run share: its configuration, its keys, and how a stage is brought to its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from slurm.backend import Job, JobKey, Record, State
from slurm.snapshot import snapshot_code
from slurm.submit import attach_or_submit, find, live_jobs
from slurm.watch import wait
from specrl.artifacts import RESULT_FILE
from specrl.config import Config, StageName, parse_config
from specrl.context import StageContext
from specrl.keys import INPUTS, code_digest, run_keys
from specrl.progress import ProgressState

CONFIG_FILE = "config.json"
MLFLOW_RUN_FILE = "mlflow_run_id"


@dataclass(frozen=True)
class Finished:
    """A stage that has finished."""

    stage: StageName
    key: str
    folder: Path
    seconds: float
    """The run time that the stage itself measured."""
    job_id: str | None
    cached: bool
    """Whether it had finished before this flow."""


class Reporter(Protocol):
    """Tells people how the stages are getting on."""

    def submitted(self, stage: str, job: Job) -> None: ...
    def polled(self, stage: str, state: State, progress: ProgressState | None) -> None: ...
    def finished(self, stage: str, done: Finished) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Run:
    """A run on which this flow works."""

    config: Config
    code: Path
    """The snapshot of the sources that the jobs import."""
    keys: dict[StageName, str]
    mlflow_run_id: str
    reporter: Reporter = field(repr=False)

    def folder(self, stage: StageName) -> Path:
        """Return the folder of everything that a stage leaves."""
        return self.config.run_dir / "stages" / self.keys[stage]


def read_run_config(run_dir: Path) -> Config:
    """Return the configuration in a run's folder, with the name and place that the folder has now.

    Raises:
        ConfigError: This version of specrl does not understand the configuration.
        FileNotFoundError: The folder is not a run's.
    """
    data = json.loads((run_dir / CONFIG_FILE).read_text())
    return parse_config({**data, "name": run_dir.name, "runs_dir": str(run_dir.parent)})


def open_run(run_dir: Path, reporter: Reporter) -> Run:
    """Read a run's folder, copy the code, compute all keys, and cancel jobs of other keys that still run."""
    config = read_run_config(run_dir)
    code = snapshot_code(run_dir)
    run_id = run_dir / MLFLOW_RUN_FILE
    run = Run(
        config=config,
        code=code,
        keys=run_keys(config, code_digest(code / "specrl")),
        mlflow_run_id=run_id.read_text().strip() if run_id.exists() else "",
        reporter=reporter,
    )
    for key, job in live_jobs(config).items():
        if key not in run.keys.values():
            job.cancel()
            belongs = "which belongs to another configuration or code"
            reporter.note(f"cancelled {job.backend} job {job.job_id}: it ran {key}, {belongs}")
    return run


def run_stage(run: Run, stage: StageName, *inputs: Finished, entry: str | None = None) -> Finished:
    """Bring a stage to its end: skip it if it has finished, or else attach to its job or submit one, and wait.

    Args:
        inputs: The finished stages that it reads.
        entry: `module:function` that runs in every rank; `specrl.stages.STAGE:main` by default.

    Raises:
        JobError: The job failed.
    """
    assert {done.stage for done in inputs} == set(INPUTS[stage])
    folder = run.folder(stage)
    cached = (folder / RESULT_FILE).exists()
    if not cached:
        context = StageContext(
            config=run.config,
            stage=stage,
            key=run.keys[stage],
            stage_dir=folder,
            inputs={done.stage: done.folder for done in inputs},
            mlflow_run_id=run.mlflow_run_id,
        )
        _work(run, context, entry or f"specrl.stages.{stage}:main")
    done = _finished(run, stage, cached)
    run.reporter.finished(stage, done)
    return done


def _work(run: Run, context: StageContext, entry: str) -> None:
    """Attach to the stage's job or submit one, and wait for it.

    An interrupt by the user (Ctrl-C) cancels the job. A flow that another signal ends leaves it, to be found again.
    """
    try:
        job = attach_or_submit(context, entry, run.code)
        if job is None:
            return
        run.reporter.submitted(context.stage, job)
        wait(job, context, lambda state, progress: run.reporter.polled(context.stage, state, progress))
    except KeyboardInterrupt:
        if (job := find(JobKey(run.config, context.key))) is not None:
            job.cancel()
            run.reporter.note(f"{context.stage}: cancelled {job.backend} job {job.job_id}")
        raise


def _finished(run: Run, stage: StageName, cached: bool) -> Finished:
    folder = run.folder(stage)
    seconds = float(json.loads((folder / RESULT_FILE).read_text())["seconds"])
    record = Record.read(JobKey(run.config, run.keys[stage]).record_path)
    return Finished(stage, run.keys[stage], folder, seconds, record.job_id if record else None, cached)


def cancel_jobs(run_dir: Path, say: Callable[[str], None] = print) -> None:
    """Cancel every job of a run."""
    for job in live_jobs(read_run_config(run_dir)).values():
        job.cancel()
        say(f"cancelled {job.backend} job {job.job_id}")
