"""Options and arguments shared by several commands."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.folder import anchor
from specrl.config import RUNS_DIR, Config, ConfigError, load_config
from specrl.config.text import expanded
from specrl.processes import LOOPBACK, free_port


def option(help_text: str, metavar: str | None = None, name: str | None = None, least: int | None = None) -> Any:
    """Describe an option, a number if it has a `least` value; `name` if it differs from the parameter's."""
    metavar = metavar or (None if least is None else "NUMBER")
    return typer.Option(*([name] if name else []), metavar=metavar, help=help_text, min=least)


def user_path(context: typer.Context, parameter: typer.CallbackParam, place: Path) -> Path:
    """Expand a path from the command line or the environment: bash, for one, leaves `--to=~/folder` unchanged."""
    try:
        return Path(str(expanded(place)))
    except ValueError as error:
        source = context.get_parameter_source(str(parameter.name))
        of_environment = source is not None and source.name == "ENVIRONMENT"
        raise ConfigError(f"{parameter.envvar if of_environment else parameter.opts[0]}: {error}") from error


ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration: a TOML file.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The name of a run, or the path of its folder.")]
RunsDir = Annotated[
    Path,
    typer.Option(
        "--runs-dir",
        metavar="FOLDER",
        envvar=RUNS_DIR,
        help="The folder that holds the runs.",
        callback=user_path,
    ),
]
AsJson = Annotated[bool, option("Print JSON, and nothing else, on standard output.", name="--json")]
Port = Annotated[int | None, option("The port on 127.0.0.1; by default a free one.", "PORT")]
CLUSTER = "Where the jobs run: local (this machine), slurm, or a class as module:Class. It overrides cluster.backend."
Cluster = Annotated[str | None, option(CLUSTER, "NAME")]
SET = "Override a key of the configuration, as in --set train.num_steps=10. May be given several times."
Overrides = Annotated[list[str] | None, option(SET, "KEY=VALUE", "--set")]


def load(config_path: Path, cluster: str | None, overrides: list[str] | None) -> Config:
    """Read a configuration with the command line's overrides and absolute paths; a ConfigError if it is wrong."""
    backend = [f'cluster.backend="{cluster}"'] if cluster else []
    return anchor(load_config(config_path, [*(overrides or []), *backend]))


def print_json(value: Any) -> None:
    """Print a value as JSON; types unknown to JSON, such as paths, become text."""
    print(json.dumps(value, indent=2, default=str))


def usable_port(asked: int | None, usual: int = 0) -> int:
    """A free port: the requested one, or a ConfigError; without a request, the usual one if it is free."""
    port = usual if asked is None else asked
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            if asked is None:
                return free_port()
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--port {port}: {LOOPBACK}:{port} cannot be used ({why}); leave --port out for a free one"
            ) from error
    return port or free_port()
