"""The flow behind `specrl serve`, which runs a configuration under a new name at each scheduled time."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow

from flows.execute import execute
from flows.own_code import resume_with_own_code
from specrl.config import Config, parse_config
from specrl.lineage.record import code_of
from tasks.run import cancel_jobs


def cancel(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the run's jobs when the flow is cancelled in Prefect, which passes the arguments by these names."""
    assert flow_run.expected_start_time is not None
    run_dir = config_at(flow_run.parameters["config"], flow_run.expected_start_time).run_dir
    if run_dir.is_dir():
        cancel_jobs(run_dir)


@flow(name="specrl-scheduled", on_cancellation=[cancel], validate_parameters=False)
def scheduled(config: str) -> None:
    """Run a configuration under a name with the scheduled time.

    A run that exists under this name, because Prefect runs the flow again, is resumed with its own code.

    Args:
        config: The configuration as JSON.

    Raises:
        ConfigError: The run cannot start; nothing has been written.
        JobError: A stage failed.
    """
    named = config_at(config, runtime.flow_run.scheduled_start_time)
    if code_of(named.run_dir) is None:
        execute(named)
    else:
        resume_with_own_code(named.run_dir)


def config_at(config: str, time: datetime) -> Config:
    """Return the configuration with the name `NAME-YYYYMMDD-HHMM`.

    Under its own name it would run only once: the second run would find all stages finished.

    Args:
        config: The configuration as JSON.
        time: The time in UTC that the name is to have.
    """
    data = json.loads(config)
    return parse_config({**data, "name": f"{data['name']}-{time:%Y%m%d-%H%M}"})
