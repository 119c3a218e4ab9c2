"""`specrl ls`, `show`, `logs`, `samples`, `ui` and `doctor`: look at runs and at this machine."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flows.commands.options import AsJson, Port, RunName, RunsDir, option, print_json, usable_port
from flows.commands.watch import Watcher
from flows.folder import find_run_to_read, is_worked_on, list_runs, list_unreadable
from slurm.backend import FLOW_KEY
from slurm.environment import ROOT, job_environment
from specrl.artifacts import RESULT_FILE
from specrl.config import STAGES, Config, ConfigError
from specrl.lineage.record import CODE_DIR
from specrl.processes import LOOPBACK
from specrl.report.results import CONFIG_FILE, find_stages, is_run, readable_config, readable_settings
from specrl.report.tables import print_line, print_table, printable

Count = Annotated[int, option("How many of them to show.", least=0)]


def ls(as_json: AsJson = False, runs_dir: RunsDir = Path("runs")) -> None:
    """List the runs, the newest first."""
    runs = [_about(run_dir) for run_dir in (*list_runs(runs_dir), *list_unreadable(runs_dir))]
    if as_json:
        print_json(runs)
    elif runs:
        for run in runs:
            run["started"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["started"]))
        columns = ("run", "state", ">stages", "model", "started")
        rows = [[str(run[column.removeprefix(">")]) for column in columns] for run in runs]
        print_table(f"Runs in {runs_dir.absolute()}", columns, rows)
    else:
        print_line(
            f"no runs in {runs_dir.absolute()}{'' if runs_dir.is_dir() else ', which is no folder'}; begin with: "
            "specrl run configs/quickstart.toml"
        )


def _about(run_dir: Path) -> dict[str, Any]:
    try:
        stages = [folder for folder in find_stages(run_dir).values() if (folder / RESULT_FILE).exists()]
        state = _state(run_dir, len(stages))
    except PermissionError:  # somebody else's run
        stages, state = [], "?"
    model = readable_settings(run_dir).get("model") if is_run(run_dir) else None
    codes = [path.stat().st_mtime for path in (run_dir / CODE_DIR).glob("*")]  # the first is copied at the start
    return {
        "run": run_dir.name,
        "state": state,
        "stages": f"{len(stages)}/{len(STAGES)}",
        "model": str(model["source"]) if isinstance(model, dict) and "source" in model else "?",
        "started": min(codes, default=(run_dir / CONFIG_FILE).stat().st_mtime),
        "folder": run_dir.absolute(),
    }


def _state(run_dir: Path, num_finished: int) -> str:
    if not is_run(run_dir):
        return "unreadable"
    if num_finished == len(STAGES) and not is_worked_on(run_dir):
        return "finished"
    return Watcher(run_dir, readable_config(run_dir)).look().state


def show(name: RunName, as_json: AsJson = False, runs_dir: RunsDir = Path("runs")) -> None:
    """Show the results of a run.

    The tables show what the run achieved, where the time went and where its files are. With --json, print summary.json,
    with what there is so far.
    """
    from specrl.report.summary import build_summary, render_summary

    run_dir = find_run_to_read(name, runs_dir)
    if as_json:
        print_json(build_summary(run_dir, None))
    else:
        render_summary(run_dir, Console(soft_wrap=True))


def logs(
    name: RunName,
    stage: Annotated[str | None, option("By default the one that logged last; flow for --detach.", "STAGE")] = None,
    rank: Annotated[int, option("The rank whose log to print.", least=0)] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run has no jobs left.")] = False,
    lines: Annotated[int, option("How many lines to print, from the end.", least=0)] = 100,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Print the log of a stage's newest job."""
    run_dir = find_run_to_read(name, runs_dir)
    if stage not in (None, "flow", *STAGES):
        raise ConfigError(f"--stage {stage}: allowed: {', '.join(STAGES)}, flow")
    shown: Path | None = None
    position = 0
    watcher = Watcher(run_dir, readable_config(run_dir))
    for _ in watcher.views() if follow else [watcher]:
        log = _newest_log(run_dir, stage or "*", rank)
        if log is not None:
            if log != shown:  # everything that other jobs print
                shown, position = log, _start_of_lines(log, lines) if shown is None else 0
            position = _print_from(log, position)
    if shown is None:
        raise ConfigError(f"run {run_dir.name} has no log of rank {rank}{f' of {stage}' if stage else ''}")


def _newest_log(run_dir: Path, stage: str, rank: int) -> Path | None:
    """The most recent log; the flow's own only if requested or the only one."""
    logs = run_dir.glob(f"jobs/{stage}-*/*_{rank}_log.out")
    found = [path for path in logs if path.is_file() and not path.is_symlink()]
    return max(found, key=lambda path: (path.parent.name != FLOW_KEY, path.stat().st_mtime), default=None)


def _start_of_lines(log: Path, count: int) -> int:
    text = log.read_bytes()
    parts = text.removesuffix(b"\n").rsplit(b"\n", count)
    return min(len(parts[0]) + 1, len(text)) if len(parts) > count else 0


def _print_from(log: Path, position: int) -> int:
    """Print a log from a position on, or all of it if it was restarted; return where it ends."""
    with log.open("rb") as file:
        file.seek(position if position <= log.stat().st_size else 0)
        print(printable(file.read().decode(errors="replace")), end="", flush=True)
        return file.tell()


def samples(
    name: RunName,
    step: Annotated[int | None, option("The RL step, from 0; the last one by default.", least=0)] = None,
    best: Count = 3,
    worst: Count = 3,
    longest: Count = 3,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show prompts, responses and rewards of a run.

    Of one step, it shows the responses with the highest and with the lowest reward, and the longest ones.
    """
    from specrl.report.samples import SampleReader, print_samples

    run_dir = find_run_to_read(name, runs_dir)
    reader = SampleReader(run_dir)
    steps = reader.steps
    if not steps:
        raise ConfigError(f"run {run_dir.name} has no rollouts yet")
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step}: run {run_dir.name} has rollouts of steps {steps[0]} to {steps[-1]}")
    shown = reader.step(steps[-1] if step is None else step, best, worst, longest)
    if as_json:
        print_json({"run": run_dir.name, **asdict(shown)})
        return
    print(f"step {shown.step}: {shown.num_responses} responses, mean reward {shown.reward_mean:.3f}\n")
    for why, chosen in shown.chosen.items():
        if chosen:
            print_samples(why, chosen)


def ui(runs_dir: RunsDir = Path("runs"), port: Port = None) -> None:
    """Serve MLflow's pages on this machine.

    They show the metrics and files of all runs, on the loopback interface, until Ctrl-C. The printed address opens a
    table of the runs, and contains a token, without which other users of the machine see nothing.
    """
    from flows.mlflow_ui import TOKEN  # imports starlette
    from specrl.tracking.store import table_address, tracking_uri

    if not runs_dir.is_dir():
        raise ConfigError(f"no runs in {runs_dir.absolute()}, which is no folder")
    chosen = usable_port(port, 5000)
    config = Config(name="ui", runs_dir=runs_dir)
    table = table_address(config) if (runs_dir / "mlflow.db").is_file() else ""
    token = secrets.token_urlsafe()
    private = {**job_environment(ROOT), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", TOKEN: token}
    command = [sys.executable, "-m", "mlflow", "ui", "--host", LOOPBACK, "--port", str(chosen)]
    command += ["--app-name", "specrl", "--backend-store-uri", tracking_uri(config)]
    print(f"MLflow is at http://{LOOPBACK}:{chosen}/?token={token}{table} ; Ctrl-C ends it", flush=True)
    with suppress(KeyboardInterrupt):
        raise typer.Exit(subprocess.run(command, env={**os.environ, **private}, check=False).returncode)


def doctor(as_json: AsJson = False, runs_dir: RunsDir = Path("runs")) -> None:
    """Check what this machine can run.

    For everything that is missing, a line says how to fix it. The exit code is 1 if a check failed.
    """
    from specrl.report.doctor import checks, exit_code, render
    from specrl.tracking.store import uri_of_environment

    found = checks(runs_dir, uri_of_environment())
    if as_json:
        print_json([asdict(check) for check in found])
    else:
        render(found)
    raise typer.Exit(exit_code(found))
