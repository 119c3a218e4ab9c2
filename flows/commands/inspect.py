"""`specrl ls`, `show`, `ui` and `doctor`: look at runs and at this machine."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.commands.options import RunName, RunsDir
from flows.folder import find_run_to_read, finished_stages, is_worked_on, list_runs, model_of
from flows.mlflow_ui import TOKEN
from specrl.config import STAGES, Config
from specrl.report.results import CONFIG_FILE
from specrl.report.tables import print_line, print_table


def register(app: typer.Typer) -> None:
    app.command("ls")(ls)
    app.command("show")(show)
    app.command("ui")(ui)
    app.command("doctor")(doctor)


def ls(runs_dir: RunsDir = Path("runs")) -> None:
    """List the runs, the newest first."""
    console = Console()
    rows = [_row(run_dir) for run_dir in list_runs(runs_dir)]
    if not rows:
        print_line(console, f"no runs in {runs_dir.absolute()}; begin with: specrl run configs/quickstart.toml")
        return
    print_table(console, f"Runs in {runs_dir.absolute()}", ("run", "state", ">stages", "model", "started"), rows)


def show(name: RunName, runs_dir: RunsDir = Path("runs")) -> None:
    """Show the results of a run.

    The tables say what the run reached, where the time went and where its files are.
    """
    from specrl.report.summary import render_summary

    render_summary(find_run_to_read(name, runs_dir), Console(soft_wrap=True))


def ui(
    runs_dir: RunsDir = Path("runs"),
    port: Annotated[int, typer.Option(metavar="PORT", help="The port on 127.0.0.1.")] = 5000,
) -> None:
    """Serve MLflow's pages on this machine.

    They show the metrics and files of all runs, on the loopback interface, until Ctrl-C. The printed address leads to a
    table of the runs and holds a token, without which other users of the machine see nothing.
    """
    from specrl.tracking import table_address, tracking_uri

    store, table = tracking_uri(Config(name="ui", runs_dir=runs_dir)), ""
    if (runs_dir / "mlflow.db").is_file():
        table = table_address(Config(name="ui", runs_dir=runs_dir))
    token = secrets.token_urlsafe()
    environment = {
        **os.environ,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "DO_NOT_TRACK": "true",
        TOKEN: token,
    }
    command = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port), "--app-name", "specrl"]
    print(f"MLflow is at http://127.0.0.1:{port}/?token={token}{table} ; Ctrl-C ends it", flush=True)
    code = subprocess.run([*command, "--backend-store-uri", store], env=environment, check=False)
    raise typer.Exit(code.returncode)


def doctor(runs_dir: RunsDir = Path("runs")) -> None:
    """Check what this machine can run.

    Everything that is missing comes with a line that says how to fix it. The exit code is 1 when a check failed.
    """
    from specrl.report.doctor import checks, exit_code, render

    found = checks(runs_dir)
    render(found)
    raise typer.Exit(exit_code(found))


def _row(run_dir: Path) -> tuple[str, ...]:
    finished = finished_stages(run_dir)
    ended = "finished" if (run_dir / "summary.json").exists() else "stopped"
    try:
        state = "running" if is_worked_on(run_dir) else ended
    except PermissionError:  # somebody else's run
        state = "?"
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime((run_dir / CONFIG_FILE).stat().st_mtime))
    return (run_dir.name, state, f"{len(finished)}/{len(STAGES)}", model_of(run_dir), started)
