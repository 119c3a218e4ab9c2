"""`specrl serve`: run a configuration on a schedule."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from cronsim import CronSim, CronSimError
from rich.console import Console

from flows.commands.options import Cluster, ConfigPath, Overrides, load
from flows.preflight import check
from flows.server import PrefectServer
from slurm.registry import backends_of
from specrl.config import Config, ConfigError, dump_config


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    config_path: ConfigPath,
    cron: Annotated[
        str,
        typer.Option(metavar="FIELDS", help='The schedule, as five cron fields in UTC, such as "0 2 * * *".'),
    ],
    cluster: Cluster = None,
    overrides: Overrides = None,
) -> None:
    """Run a configuration on a schedule.

    Each scheduled time starts a new run, named NAME-YYYYMMDD-HHMM. The command stays in the foreground until Ctrl-C.
    """
    check_cron(cron)
    config = load(config_path, cluster, overrides)
    for backend in backends_of(config):
        backend.connect()
    check(config)
    with PrefectServer(config.runs_dir) as server:
        server.wait()
        Console(soft_wrap=True).print(
            f"{config.name} runs at {cron} (UTC) in {config.runs_dir}; Ctrl-C ends it", markup=False
        )
        _serve(config, cron)


def check_cron(cron: str) -> None:
    """Check a schedule before anything starts.

    Raises:
        ConfigError: `cron` is not a schedule of five cron fields.
    """
    allowed = 'five cron fields (minute hour day month weekday), such as "0 2 * * *"'
    try:
        # Not Prefect's own check: importing Prefect fixes its settings, and its server has not set them yet.
        CronSim(cron, datetime.now(UTC))
    except CronSimError as error:
        raise ConfigError(f"--cron {cron!r}: {str(error).lower()}; allowed: {allowed}") from error
    if len(cron.split()) != 5:  # CronSim also accepts a sixth field, of seconds.
        raise ConfigError(f"--cron {cron!r}: {len(cron.split())} fields; allowed: {allowed}")


def _serve(config: Config, cron: str) -> None:
    from prefect.types.entrypoint import EntrypointType

    from flows.scheduled import scheduled  # imports Prefect, which reads its environment once

    scheduled.serve(
        name=config.name,
        cron=cron,
        parameters={"config": dump_config(config)},
        limit=1,  # one run has the machine, or the allocation, to itself
        print_starting_message=False,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
