"""Runs to attack, and the command line in a process that may be hurt."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from flows.cli import app, invoke
from flows.folder import write_config
from slurm.trust import sources_digest
from specrl.artifacts import write_json
from specrl.config import Config, parse_config
from specrl.lineage.record import RunRecord
from tasks.run import begin

for module in ("samples", "summary"):  # once, and not in each fork
    importlib.import_module(f"specrl.report.{module}")
NOBODY = 65534
SECONDS = 120
"""After how long a command that hangs is ended: a test then fails and does not wait for ever."""
EVIL = "import pathlib; pathlib.Path({marker!r}).write_text('somebody else\\'s code has run')\n"
READING = ("show", "watch", "logs", "samples")
"""The commands that look at a run, whosever it is."""


@dataclass(frozen=True)
class Ended:
    code: int
    text: str
    """What it printed, on both streams."""


def specrl(*arguments: str, user: int | None = None, folder: Path | None = None) -> Ended:
    """Run a command line in a fork, which may be replaced, killed or hang.

    Args:
        user: The user whose rights it has.
        folder: Its working folder.
    """
    return in_fork(lambda: invoke(list(arguments)), user, folder)


def in_fork(work: Callable[[], int], user: int | None = None, folder: Path | None = None) -> Ended:
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            code = 70
            try:
                signal.alarm(SECONDS)
                os.chdir(folder or "/")
                for number in (1, 2):
                    os.dup2(output.fileno(), number)
                if user is not None:
                    os.setgroups([])
                    os.setgid(user)
                    os.setuid(user)
                sys.stdout = os.fdopen(1, "w", closefd=False)
                sys.stderr = os.fdopen(2, "w", closefd=False)
                code = work()
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return Ended(os.waitstatus_to_exitcode(status), output.read().decode())


@dataclass(frozen=True)
class Attacked:
    """A run that has begun, whose own code leaves a marker when it is imported."""

    config: Config
    record: RunRecord
    marker: Path

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir

    def stage(self, name: str) -> Path:
        return self.run_dir / "stages" / self.record.stage_keys[name]  # type: ignore[index]

    def contents(self) -> dict[str, tuple[int, int, bytes | None]]:
        """Everything in the folder of the runs: owner, mode and contents."""
        found = {}
        for path in sorted(self.config.runs_dir.rglob("*")):
            state = path.lstat()
            small = path.is_file() and not path.is_symlink() and state.st_size < 10**6
            found[str(path)] = state.st_uid, state.st_mode, path.read_bytes() if small else None
        return found

    def give_to(self, user: int) -> None:
        for path in (self.run_dir, *self.run_dir.rglob("*")):
            os.chown(path, user, user, follow_symlinks=False)


def attacked(tmp_path: Path, **sections: Any) -> Attacked:
    """Make a run with results, whose code is not the present one, and whose settings this version does not know."""
    config = parse_config({"name": "run", "runs_dir": str(tmp_path / "runs"), "model": {"source": "tiny"}, **sections})
    config.runs_dir.mkdir(mode=0o755)
    config.run_dir.mkdir(mode=0o755)
    record, marker = begin(config), tmp_path / "marker"
    write_config(config)
    run = Attacked(config, record, marker)
    code = record.code_dir(config.run_dir)
    for package in ("flows", "slurm", "specrl"):
        (code / package / "__init__.py").write_text(EVIL.format(marker=str(marker)))
    rename_code(run)
    write_results(run)
    return run


def rename_code(run: Attacked) -> Path:
    """Give the copy of the code the digest that it has now, as whoever can write to the folder would."""
    (code,) = (run.run_dir / "code").iterdir()
    names = [str(path.relative_to(code)) for path in code.rglob("*") if path.is_file()]
    target = code.rename(code.with_name(sources_digest(code, names)))
    edit(run.run_dir / "run.json", code=target.name)
    return target


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_results(run: Attacked) -> None:
    """Write what the reading commands show."""
    train, prepare = run.stage("train"), run.stage("prepare")
    policy = {"policy_dir": str(prepare / "policy"), "seconds": 1.0}
    write_json(prepare / "result.json", policy)
    write_json(prepare / "policy" / "tokenizer.json", {})
    metrics = {
        "timing/step_s": 30.0,
        "reward/mean": 0.5,
        "spec/acceptance_length": 2.5,
        "performance/generation_tokens_per_s": 123.4,
    }
    write_json(train / "steps" / "step=000000.json", {"step": 0, "metrics": metrics})
    write_json(train / "progress.json", {})
    write_json(train / "tracking" / "sent-mlflow.json", {})
    write_json(train / "validation" / "step=000000.json", [])
    (train / "events.jsonl").write_text(json.dumps({"time": 1.0, "step": 0, "kind": "restart", "text": "again"}) + "\n")
    (train / "segments.jsonl").write_text("")
    (train / "rollouts" / "step=000000").mkdir(parents=True)
    (train / "rollouts" / "step=000000" / "rank=0000.arrow").write_bytes(b"")
    job = run.run_dir / "jobs" / train.name
    write_json(job / "context.json", {})
    (job / "1_0_log.out").write_text("what a rank has printed\n")
    write_json(job.with_suffix(".json"), {})
    write_json(run.run_dir / "summary.json", {})
    (run.run_dir / ".flow.lock").touch()
    (run.run_dir / ".flow.holder").write_text("process 1 on host")


def commands_with_a_run() -> Iterator[tuple[tuple[str, ...], str | None]]:
    """The commands that take a run, with the option by which they do; None for an argument."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        for name, sub in getattr(command, "commands", {}).items():
            yield from walk(sub, (*path, name))
        if not hasattr(command, "commands"):
            yield path, command

    for path, command in walk(typer.main.get_command(app), ()):
        for parameter in command.params:
            if re.search(r"\bRUN\b", str(parameter.metavar)):
                yield path, parameter.opts[0] if parameter.opts[0].startswith("-") else None


COMMANDS = list(commands_with_a_run())
WORDS = {
    ("export",): ["--format", "eagle3", "--to", "out"],
    ("rm",): ["--yes"],
    ("watch",): ["--once"],
    ("resume",): ["--dry-run"],
}
"""What else a command needs, or is to be told."""


def line_of(command: tuple[str, ...], option: str | None, run: Attacked, tmp_path: Path) -> list[str]:
    """The command line by which a command gets a run."""
    runs = ["--runs-dir", str(run.config.runs_dir)]
    words = [str(tmp_path / word) if word == "out" else word for word in WORDS.get(command, [])]
    if command == ("run",):
        (tmp_path / "new.toml").write_text(
            f'name = "new"\nruns_dir = "{run.config.runs_dir}"\n[model]\nsource = "tiny"\n'
        )
        return ["run", str(tmp_path / "new.toml"), "--from", "run", "--dry-run"]
    if option == "--calibrated-on":
        return [*command, "run", option, "run", *runs]
    return [*command, *(["run"] if option is None else [option, "run"]), *words, *runs]
