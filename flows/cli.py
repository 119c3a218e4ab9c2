"""The `specrl` command. A user's mistake is one line on standard error and exit code 2, without a traceback."""

from __future__ import annotations

import errno
import os
import sys
from importlib import metadata
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from flows.commands import bench, export, inspect, project, reward, run, serve, watch
from flows.server import ServerError
from slurm.access import PRIVATE
from slurm.backend import JobError, SilentSchedulerError, StoppedError
from slurm.trust import DistrustError
from specrl.config import ConfigError
from specrl.processes import allow_warnings, name_user, reach_loopback
from specrl.report.tables import lasting, printable
from tasks.detached import EXIT_STOPPED

app = typer.Typer(
    name="specrl",
    help="Post-train language models by reinforcement learning, with exact speculative rollouts.\n\n"
    "Start with: specrl doctor, then specrl run configs/quickstart.toml",
    epilog="Exit codes: 0 done; 1 failed; 2 a mistake in the command or the configuration; 3 stopped by specrl stop; "
    "130 interrupted.",
    context_settings={"max_content_width": 120},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    *(run.run, run.resume, run.stop, run.cancel, run.sync),
    *(inspect.ls, inspect.show, watch.watch, inspect.logs, inspect.samples, reward.reward),
    *(export.export, export.serve_model, run.rm, inspect.ui, inspect.doctor),
    *(serve.serve, serve.deploy, project.project),
):
    app.command()(command)
app.add_typer(bench.group, name="bench")

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)  # the errors of a full disk and of an exhausted quota
RESUMABLE = ("run", "resume")  # the commands whose work `specrl resume` continues
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def _print_version(asked: bool) -> None:
    if asked:
        print(f"specrl {metadata.version('specrl')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Handle the options of all commands."""


def main() -> None:
    """Run this process's command line and exit with its code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as under some daemons: the next file would be opened in its place
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, TextIOWrapper):  # escape what the terminal's encoding lacks, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Run a command line (the arguments of `specrl`) and return its exit code; without arguments, print the help."""
    reach_loopback()
    name_user()
    allow_warnings()
    if os.environ.get("COLUMNS") == "0":  # for a terminal of unknown width: nothing would be printed
        del os.environ["COLUMNS"]
    os.umask(PRIVATE)  # for everything that the command starts; a run's jobs open its folder to its group if configured
    try:
        code = int(app(args=arguments or ["--help"], prog_name="specrl", standalone_mode=False, obj=arguments) or 0)
        if code == EXIT_INTERRUPTED:  # typer's silent exit on an interrupt
            raise KeyboardInterrupt
        return code
    except (ConfigError, DistrustError, typer.TyperException) as error:  # typer's: a missing argument, for one
        said = getattr(error, "format_message", error.__str__)()
        is_setting = said.startswith("Got unexpected extra argument") and "=" in said and _takes_settings(error)
        _complain(f"{said}; a setting is given as --set KEY=VALUE" if is_setting else said)
        return EXIT_USAGE
    except (JobError, SilentSchedulerError, ServerError) as error:
        _complain(str(error))
    except BrokenPipeError:  # as in `specrl ls | head`; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        _complain(_said(error, arguments))
    except StoppedError as error:
        _complain(str(error))
        return EXIT_STOPPED
    except (KeyboardInterrupt, typer.Abort):
        _complain("interrupted")
        return EXIT_INTERRUPTED
    return EXIT_FAILED


def _takes_settings(error: Exception) -> bool:
    """Whether the command has `--set`, for which other programs accept bare KEY=VALUE."""
    context = getattr(error, "ctx", None)
    return context is not None and any("--set" in option.opts for option in context.command.params)


def _said(error: OSError, arguments: list[str]) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOENT and not where:
        try:
            Path.cwd()
        except FileNotFoundError:
            return "the current folder has been removed; change to another one"
    if error.errno not in FULL_DISK:
        return f"{where}{error.strerror or error}"
    then = ", and go on with specrl resume RUN" if arguments[:1] and arguments[0] in RESUMABLE else " first"
    return f"{where}{error.strerror}; make room{then}"


def _complain(message: str) -> None:
    for line in message.split("\n"):
        print(f"specrl: {printable(line)}", file=lasting(sys.stderr))


if __name__ == "__main__":
    main()
