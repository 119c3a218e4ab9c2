"""`specrl serve` and `specrl deploy`: run a configuration on a schedule.

A helper process of `specrl serve`, whose `main` is here, waits for the scheduled times and starts a flow at each.
Signals to `specrl serve` reach the helper and its flows only if they are passed on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated
from zoneinfo import available_timezones

from flows.commands.options import Cluster, ConfigPath, Overrides, load, option
from flows.folder import holder_of, is_trusted, is_worked_on, list_runs
from flows.preflight import check
from flows.server import PrefectServer, ServerError, quieten
from slurm.access import restrict
from slurm.backend import Job, JobError, JobKey, SilentSchedulerError
from slurm.environment import ROOT, job_environment
from slurm.submit import find_now
from specrl.config import Config, ConfigError
from specrl.processes import end_with_parent, start_helper
from specrl.report.results import read_config
from specrl.report.tables import print_line

LOOK_SECONDS = 0.2  # between checks of signals and processes
END_SECONDS = 30  # for a flow to end after a signal, before it is killed
Cron = Annotated[str, option('The schedule, as five cron fields, such as "0 2 * * *".', "FIELDS")]
Zone = Annotated[str, option("The time zone of the schedule, such as Europe/Berlin.", "NAME", "--time-zone")]


def serve(
    config_path: ConfigPath, cron: Cron, zone: Zone = "UTC", cluster: Cluster = None, overrides: Overrides = None
) -> None:
    """Run a configuration on a schedule.

    At each scheduled time a new run starts, named NAME-YYYYMMDD-HHMM in UTC. The command stays in the foreground until
    Ctrl-C, which cancels the jobs of a current run. SIGTERM also ends it, but leaves such jobs running.
    """
    config = _checked(config_path, cron, zone, cluster, overrides)
    with PrefectServer(config.runs_dir) as server:
        server.wait()
        print_line(f"{config.name} runs at {cron} ({zone}) in {config.runs_dir}; Ctrl-C ends it")
        noted: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: noted.append(number))
        environment = {**os.environ, **job_environment(ROOT, config)}
        runner, _ = start_helper(__name__, environment, send=[(config.name, cron, zone, config.settings)])
        try:
            while not noted:
                if runner.poll() is not None:
                    raise ServerError(f"the process that starts scheduled runs ended with code {runner.returncode}")
                time.sleep(LOOK_SECONDS)
            for line in _end_flows(runner, config.runs_dir, noted):
                print_line(line)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(runner.pid, signal.SIGKILL)  # and the flows in its session
            runner.wait()


def deploy(
    config_path: ConfigPath,
    cron: Cron,
    pool: Annotated[str, option("The work pool whose workers run it.", "NAME")],
    zone: Zone = "UTC",
    cluster: Cluster = None,
    overrides: Overrides = None,
) -> None:
    """Register a schedule with an existing Prefect server.

    The server is the one in PREFECT_API_URL or in Prefect's profile. At each scheduled time a new run starts, named
    NAME-YYYYMMDD-HHMM in UTC, on a worker of the pool. The worker needs this environment and this file system.
    """
    config = _checked(config_path, cron, zone, cluster, overrides)
    from flows.scheduled import register_schedule  # imports Prefect, which reads its environment once

    url = register_schedule(config, cron, zone, pool)
    print_line(f"{config.name} runs at {cron} ({zone}) on workers of pool {pool}, says {url}")


def _checked(config_path: Path, cron: str, zone: str, cluster: str | None, overrides: list[str] | None) -> Config:
    allowed = 'five cron fields (minute hour day month weekday), such as "0 2 * * *"'
    if len(cron.split()) != 5:  # Prefect also accepts names such as @daily, and a sixth field for seconds
        raise ConfigError(f"--cron {cron!r}: {len(cron.split())} fields; allowed: {allowed}")
    quieten()
    from prefect.client.schemas.schedules import CronSchedule

    try:
        CronSchedule(cron=cron)
    except ValueError as error:
        raise ConfigError(f"--cron {cron!r}: Prefect cannot read it; allowed: {allowed}") from error
    if zone not in available_timezones():
        raise ConfigError(f"--time-zone {zone!r}: allowed: a name such as UTC or Europe/Berlin")
    config = load(config_path, cluster, overrides)
    restrict(config.cluster)
    check(config)
    return config


def _end_flows(runner: subprocess.Popen[bytes], runs_dir: Path, noted: list[int]) -> Iterator[str]:
    """Pass the first signal on to the running flow, wait for its end, and yield the outcome of its run.

    SIGINT makes a flow cancel its job; SIGTERM ends the flow but not the job. A second signal ends the wait.
    """
    held: list[tuple[Path, int]] = []  # the runs of the runner's flows, and each flow's process
    for run_dir in list_runs(runs_dir):
        holder = holder_of(run_dir)
        with contextlib.suppress(ProcessLookupError):
            if holder is not None and is_trusted(run_dir) and os.getsid(holder) == runner.pid:
                held.append((run_dir, holder))
    if not held:
        yield "no run was at work"
    for run_dir, flow in held:
        config, jobs = read_config(run_dir), list[Job | None]()
        with contextlib.suppress(JobError, SilentSchedulerError):
            jobs = [find_now(JobKey(config, folder.name)) for folder in (run_dir / "jobs").glob("*/")]
        with contextlib.suppress(ProcessLookupError):
            os.kill(flow, noted[0])
        deadline = time.monotonic() + END_SECONDS
        while is_worked_on(run_dir) and len(noted) == 1 and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        became = "was cancelled" if noted[0] == signal.SIGINT and not is_worked_on(run_dir) else "goes on"
        words = ", ".join(f"{job.backend} job {job.job_id} {became}" for job in jobs if job)
        yield f"run {run_dir.name}: {words or 'no job of it was running'}; specrl resume {run_dir} continues the run"


def main(command: Connection) -> None:
    """Start a flow at each scheduled time, until this process or the command's ends."""
    end_with_parent(command.recv(), signal.SIGTERM)
    name, cron, zone, config = command.recv()
    from prefect.schedules import Cron
    from prefect.types.entrypoint import EntrypointType

    from flows.scheduled import scheduled

    scheduled.serve(
        name=name,
        schedule=Cron(cron, timezone=zone),
        parameters={"config": config},
        limit=1,  # one run at a time on the machine or in the allocation
        print_starting_message=False,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
