"""`specrl sync`: send what a run has logged while MLflow was away."""

from __future__ import annotations

from pathlib import Path

import typer

from flows.commands.options import RunName, RunsDir
from flows.folder import find_own_run
from specrl.config import ConfigError


def register(app: typer.Typer) -> None:
    app.command("sync")(sync)


def sync(name: RunName, runs_dir: RunsDir = Path("runs")) -> None:
    """Send to MLflow what a run has logged while MLflow was away.

    A run does so itself as soon as MLflow answers; this is for a run that has ended before that. Where its experiment
    or its run in MLflow was deleted, everything that is still here is sent again.
    """
    from specrl.tracking import sync_run
    from tasks.run import read_run_config

    config = read_run_config(find_own_run(name, runs_dir))
    unsent = sync_run(config)
    if unsent:
        folders = ", ".join(folder.name for folder in unsent)
        raise ConfigError(f"MLflow or its artifact store does not answer; some of what {folders} logged waits on disk")
    print(f"MLflow has everything that {config.name} has logged")
