"""The pipeline: the stages of a run in order.

Each stage is a job, and runs unless its result file exists. Prefect records and shows the run, but neither retries nor
caches: only Slurm retries, and files record what is finished.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow

from flows.server import PASSWORD, USER
from specrl.report.html import write_report
from specrl.report.summary import SUMMARY_FILE, write_summary
from specrl.tracking.runs import log_to_run
from tasks.display import make_reporter
from tasks.run import end_jobs, open_run
from tasks.stages import calibrate, export, prepare, pretrain, train, validate


def cancel(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the run's jobs when the flow is cancelled in Prefect; a SIGTERM to the flow leaves them running.

    Prefect passes the arguments by these names.
    """
    end_jobs(Path(flow_run.parameters["run_dir"]), stop=False)


@flow(name="specrl", flow_run_name="{run_dir}", on_cancellation=[cancel], validate_parameters=False)
def pipeline(run_dir: str) -> None:
    """Run all stages of the run in a folder. Finished stages are skipped; a JobError if one failed."""
    with make_reporter() as reporter:
        run = open_run(Path(run_dir), reporter)
        is_own_server = os.environ.get(PASSWORD, "").startswith(f"{USER}:")  # which shows no pages
        page = {} if is_own_server else {"specrl.prefect.page": runtime.flow_run.ui_url}
        log_to_run(run.config, {}, {}, {"specrl.prefect.flow_run": runtime.flow_run.id, **page})
        (run.config.run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # it may stem from another configuration
        policy = prepare(run)
        drafter = pretrain(run, policy)
        scales = calibrate(run, policy, drafter)
        trained = train(run, policy, drafter, scales)
        validated = validate(run, policy, drafter, trained)
        export(run, policy, trained, validated)
    write_summary(run.config.run_dir, run.mlflow_run_id or None)
    write_report(run.config.run_dir)
