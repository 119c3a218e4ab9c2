"""The flow behind `specrl serve`: at each of its times, the configuration runs as a run of its own."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow

from flows.execute import execute
from specrl.config import Config, parse_config
from tasks.run import cancel_jobs


def cancel(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Prefect's cancel takes the run's jobs down (Prefect calls hooks by these names)."""
    assert flow_run.expected_start_time is not None
    run_dir = config_at(flow_run.parameters["config"], flow_run.expected_start_time).run_dir
    if run_dir.is_dir():
        cancel_jobs(run_dir)


@flow(name="specrl-scheduled", on_cancellation=[cancel], validate_parameters=False)
def scheduled(config: str) -> None:
    """Run a configuration, given as JSON.

    Raises:
        ConfigError: the run cannot start; nothing has been written.
        JobError: a stage failed.
    """
    execute(config_at(config, runtime.flow_run.scheduled_start_time))


def config_at(config: str, time: datetime) -> Config:
    """The configuration under the name of its time, `NAME-YYYYMMDD-HHMM` in UTC: a run of the same name would find
    itself finished."""
    data = json.loads(config)
    return parse_config({**data, "name": f"{data['name']}-{time:%Y%m%d-%H%M}"})
