"""Code that all tasks share: opening a run, and running one of its stages as a job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm.backend import STOP_FILE, Job, JobError, JobKey, SilentSchedulerError, StoppedError, stop_asked
from slurm.environment import snapshot_code
from slurm.submit import attach_or_submit, find, live_jobs
from slurm.trust import check_code
from slurm.watch import stopped_line, wait
from specrl.artifacts import RESULT_FILE, point_to, write_text
from specrl.config import Config, StageName
from specrl.context import StageContext
from specrl.events import read_events
from specrl.keys import INPUTS, code_digest, named_files, run_keys
from specrl.lifetime.segments import end_segment, last_recorded_step, read_segments
from specrl.lineage.record import Continuation, RunRecord, new_run_id, read_record, write_record
from specrl.projection.plan import device_bytes
from specrl.report.results import job_id_of, read_config, readable_config, seconds_of
from specrl.tracking.store import run_id_of
from tasks.display import Reporter


@dataclass(frozen=True)
class Run:
    """The run of this flow."""

    config: Config
    record: RunRecord
    mlflow_run_id: str
    reporter: Reporter = field(repr=False)


def open_run(run_dir: Path, reporter: Reporter) -> Run:
    """Read a run's folder; a run without a record starts with the current code. A DistrustError if its code changed."""
    config = read_config(run_dir)
    record = read_record(run_dir) or begin(config)
    check_code(record.code_dir(run_dir), record.code)
    return Run(config, record, run_id_of(run_dir) or "", reporter)


def begin(config: Config, origin: Continuation | None = None) -> RunRecord:
    """Copy the current code into the run's folder, compute the keys of its stages, and write its record."""
    code = snapshot_code(config.run_dir)
    record = RunRecord(
        id=new_run_id(),
        settings=config.settings,
        code=code.name,
        files=named_files(config),
        stage_keys=run_keys(config, code_digest(code / "specrl"), origin and origin.content),
        origin=origin,
        continues=origin,
    )
    write_record(config.run_dir, record)
    return record


def run_stage(run: Run, stage: StageName, *, entry: str | None = None) -> Path:
    """Finish a stage after those that it reads, and return its folder.

    A finished stage is skipped; otherwise attach to its job or submit one, and wait for it.
    """
    run_dir = run.config.run_dir
    folders = {name: run_dir / "stages" / key for name, key in run.record.stage_keys.items()}
    folder = folders[stage]
    if stage == "train":  # its rollouts can be read while it runs
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
        point_to(run_dir / "rollouts", folder / "rollouts")
    cached = (folder / RESULT_FILE).exists()
    if not cached:
        context = StageContext(
            config=run.config,
            stage=stage,
            key=folder.name,
            stage_dir=folder,
            inputs={name: folders[name] for name in INPUTS[stage]},
            mlflow_run_id=run.mlflow_run_id,
            continues=(start := run.record.start_of(stage)) and start.in_run(run_dir),
            device_bytes=device_bytes(run.config, stage),
        )
        try:
            work(context, entry or f"specrl.stages.{stage}:main", run.record.code_dir(run_dir), run.reporter, stage)
        except KeyboardInterrupt:  # if another signal ends the flow, the job continues and can be found again
            if (job := find(JobKey(run.config, context.key))) is not None:
                run.reporter.note(f"{stage}: {_cancel(job, folder, run.config)}")
            raise
    if stage == "export":
        point_to(run_dir / "export", folder)
    run.reporter.finished(stage, seconds_of(folder) or 0.0, job_id_of(run_dir, folder.name), before=cached)
    for text in (event.text for event in read_events(folder) if event.kind == "data"):
        run.reporter.note(f"{stage}: {text}")
    return folder


def job_settings(config: Config, job: StageName, usual: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings in which a job that is no stage has what is usual where `[stage_resources.JOB]` says nothing."""
    settings = config.settings
    asked = {key: value for key, value in settings["stage_resources"].get(job, {}).items() if value is not None}
    settings["stage_resources"][job] = {**usual, **asked, "sbatch": {**usual["sbatch"], **asked.get("sbatch", {})}}
    return settings


_submitting = threading.Lock()  # while a job is looked for or submitted: cancelling all of a run's jobs waits for it


def work(context: StageContext, entry: str, code: Path, reporter: Reporter, label: str) -> None:
    """Attach to a stage's job or submit one, and wait for it; repeat while the stage needs another job."""
    while True:
        with _submitting:
            if stop_asked(context.run_dir):
                raise StoppedError(stopped_line(context))
            job = attach_or_submit(context, entry, code)
        if job is None:
            return
        reporter.submitted(label, job)
        if wait(job, context, lambda state, progress: reporter.polled(label, state, progress)):
            return
        reason = read_segments(context.stage_dir)[-1].reason
        reporter.note(f"{label}: job {job.job_id} ended ({reason}); it goes on in another one")


def _cancel(job: Job, stage_dir: Path, config: Config) -> str:
    """Cancel a job, record this in its stage's segments, and return the outcome in a line."""
    try:
        job.cancel()
    except SilentSchedulerError as error:
        return str(error)
    segments = read_segments(stage_dir)
    if segments and segments[-1].job_id == job.job_id:
        end_segment(stage_dir, segments[-1].number, "cancelled", last_recorded_step(stage_dir), config.cluster)
    return f"cancelled {job.backend} job {job.job_id}"


def ask_to_stop(run_dir: Path) -> list[str]:
    """Ask a run to stop and cancel its queued jobs; return a line for each job still leaving or out of reach."""
    write_text(run_dir / STOP_FILE, "")
    try:
        jobs = live_jobs(readable_config(run_dir))
    except JobError as error:  # such as a local job on another host, whose ranks see the request
        return [str(error)]
    lines = []
    for job in jobs.values():
        try:
            if job.state().phase == "pending":
                job.cancel()
            else:
                lines.append(f"{job.backend} job {job.job_id} leaves after the step that runs")
        except SilentSchedulerError as error:
            lines.append(str(error))
    return lines


def end_jobs(run_dir: Path, say: Callable[[str], None] = print, *, stop: bool = True) -> None:
    """Cancel all jobs of a run that can be reached, `say` each outcome, and `stop` flows from submitting others."""
    if stop:
        write_text(run_dir / STOP_FILE, "")
    config = readable_config(run_dir)
    with _submitting:  # includes a job that another thread is just submitting
        for key, job in live_jobs(config).items():
            say(_cancel(job, run_dir / "stages" / key, config))
