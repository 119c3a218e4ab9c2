"""The flow of `specrl serve` and `deploy`, which runs a configuration under a new name at each scheduled time."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from prefect import flow, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, WorkPool
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.flows import Flow
from prefect.schedules import Cron
from prefect.settings import PREFECT_API_URL
from prefect.types.entrypoint import EntrypointType

from flows.execute import execute, resume_in_process
from flows.server import ServerError, explain_web_page
from slurm.access import check_access
from slurm.environment import ROOT, job_environment
from specrl.config import Config, ConfigError, change_config, parse_config
from specrl.lineage.record import code_of
from tasks.run import end_jobs


def cancel(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the run's jobs when the flow is cancelled in Prefect, which passes the arguments by these names."""
    assert flow_run.expected_start_time is not None
    config = config_at(flow_run.expected_start_time, **flow_run.parameters)
    if config.run_dir.is_dir():
        check_access(config.run_dir, config.cluster)
        end_jobs(config.run_dir, stop=False)


@flow(name="specrl-scheduled", on_cancellation=[cancel])
def scheduled(config: dict[str, Any], overrides: list[str] | None = None) -> None:
    """Run a configuration, with overrides such as `train.num_steps=10`, under a name with the scheduled time.

    If a run of this name exists, because Prefect runs the flow again, it is resumed with its own code.
    """
    named = config_at(runtime.flow_run.scheduled_start_time, config, overrides)
    if code_of(named.run_dir) is None:
        execute(named)
    else:
        resume_in_process(named.run_dir)


def config_at(time: datetime, config: dict[str, Any], overrides: list[str] | None = None) -> Config:
    """The configuration with the name `NAME-YYYYMMDD-HHMM`, because it would run only once under its own name."""
    named = parse_config({**config, "name": f"{config['name']}-{time:%Y%m%d-%H%M}"})
    return change_config(named, overrides) if overrides else named


def register_schedule(config: Config, cron: str, zone: str, pool: str) -> str:
    """Register a schedule under the configuration's name, replacing an earlier one; return the server's address."""
    url: str | None = PREFECT_API_URL.value()
    if not url:
        raise ConfigError("deploy needs a Prefect server: set PREFECT_API_URL; without one, use specrl serve")
    try:
        with explain_web_page(), get_client(sync_client=True) as client:
            found = _read_pool(client, pool)
        deployment = RunnerDeployment.from_flow(
            scheduled,
            name=config.name,
            schedule=Cron(cron, timezone=zone),
            parameters={"config": config.settings},
            concurrency_limit=1,  # one run at a time in the allocation
            work_pool_name=pool,
            # A worker imports what this process does, wherever it was started; the user's files are in this folder.
            job_variables={"working_dir": str(Path.cwd()), "env": job_environment(ROOT, config)}
            if found.type == "process"
            else {},
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        deployment.apply()
    except PrefectHTTPStatusError as error:
        raise ServerError(f"Prefect's server at {url} refuses: {str(error).splitlines()[0]}") from error
    except httpx.HTTPError as error:
        raise ServerError(f"no Prefect server answers at {url} ({error or type(error).__name__})") from error
    return url


def _read_pool(client: SyncPrefectClient, name: str) -> WorkPool:
    try:
        return client.read_work_pool(name)
    except ObjectNotFound as error:
        known = ", ".join(pool.name for pool in client.read_work_pools()) or "none"
        raise ConfigError(
            f"--pool {name}: the Prefect server has no such work pool; it has: {known}; "
            f"prefect work-pool create {name} --type process makes one"
        ) from error
