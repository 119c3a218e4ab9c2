"""The pipeline, top to bottom: what runs after what.

Each stage is a job; its result file decides whether it runs. Prefect records the run and shows it; it retries and
caches nothing, since retrying belongs to one layer and the files know what is finished.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow

from flows.display import make_reporter
from specrl.report.html import write_report
from specrl.report.results import StageRecord
from specrl.report.summary import SUMMARY_FILE, write_summary
from tasks.calibrate import calibrate
from tasks.export import export
from tasks.prepare import prepare
from tasks.pretrain import pretrain
from tasks.run import Finished, Run, cancel_jobs, open_run
from tasks.train import train
from tasks.validate import validate


def cancel(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Prefect's cancel takes the jobs down; a SIGTERM to the flow does not (Prefect calls hooks by these names)."""
    cancel_jobs(Path(flow_run.parameters["run_dir"]))


@flow(name="specrl", flow_run_name="{run_dir}", on_cancellation=[cancel], validate_parameters=False)
def pipeline(run_dir: str) -> list[Finished]:
    """Run all stages of the run whose folder (with `config.json`) is given; what is finished is skipped.

    Raises:
        JobError: a stage failed; one line.
    """
    with make_reporter() as reporter:
        run = open_run(Path(run_dir), reporter)
        (run.config.run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # it may tell of another configuration
        policy = prepare(run)
        drafter = pretrain(run, policy)
        scales = calibrate(run, policy, drafter)
        trained = train(run, policy, drafter, scales)
        validated = validate(run, policy, drafter, trained)
        exported = export(run, policy, trained, validated)
    return record(run, [policy, drafter, scales, trained, validated, exported])


def record(run: Run, stages: list[Finished]) -> list[Finished]:
    """Write `summary.json`, `report.html` and Prefect's table of stages."""
    records: dict[str, StageRecord] = {
        done.stage: StageRecord(done.key, done.folder, done.seconds, done.job_id) for done in stages
    }
    write_summary(run.config.run_dir, records, run.mlflow_run_id or None)
    write_report(run.config.run_dir)
    rows = [
        {"stage": done.stage, "seconds": round(done.seconds, 1), "job": done.job_id, "cached": done.cached}
        for done in stages
    ]
    create_table_artifact(table=rows, key="stages", description=f"Stages of {run.config.name}")
    return stages
