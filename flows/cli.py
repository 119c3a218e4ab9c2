"""The `specrl` command. A user's mistake is one line on standard error and exit code 2, without a traceback."""

from __future__ import annotations

import errno
import os
import sys

import typer

from flows.commands import (
    bench,
    export,
    inspect,
    project,
    remove,
    reward,
    run,
    samples,
    serve,
    serve_model,
    watch,
)
from flows.server import ServerError
from slurm.access import PRIVATE
from slurm.backend import JobError, SilentSchedulerError, StoppedError
from specrl.config import ConfigError
from specrl.report.tables import printable

app = typer.Typer(
    name="specrl",
    help="Post-train language models by reinforcement learning, with exact speculative rollouts.\n\n"
    "Begin with: specrl doctor, then specrl run configs/quickstart.toml",
    context_settings={"max_content_width": 120},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
run.register(app)
inspect.register(app)
samples.register(app)
reward.register(app)
watch.register(app)
remove.register(app)
export.register(app)
bench.register(app)
serve.register(app)
serve_model.register(app)
project.register(app)

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk that is full, or of a user whose share of it is."""
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""The errors of what this user may not read or write, such as a part of somebody else's run."""
RESUMABLE = ("run", "resume")
"""The commands whose work `specrl resume` goes on with."""
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STOPPED = 3
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Run a command line and return its exit code.

    Args:
        arguments: The words after `specrl`; without any, the help is printed.
    """
    os.umask(PRIVATE)  # whatever the command starts; the jobs of a run open its folder to its group where it says so
    try:
        return app(args=arguments or ["--help"], prog_name="specrl", standalone_mode=False) or 0
    except typer.TyperException as error:  # such as an unknown option or a missing argument
        _complain(getattr(error, "format_message", error.__str__)())
    except ConfigError as error:
        _complain(str(error))
    except (JobError, SilentSchedulerError, ServerError) as error:
        _complain(str(error))
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in (*FULL_DISK, *CLOSED):
            raise
        _complain(_said(error, arguments))
        return EXIT_FAILED
    except StoppedError as error:
        print(error)
        return EXIT_STOPPED
    except (KeyboardInterrupt, typer.Abort):
        _complain("interrupted")
        return EXIT_INTERRUPTED
    return EXIT_USAGE


def _said(error: OSError, arguments: list[str]) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in CLOSED:
        return f"{where}{error.strerror}"
    then = ", and go on with specrl resume RUN" if arguments[:1] and arguments[0] in RESUMABLE else " first"
    return f"{where}{error.strerror}; make room{then}"


def _complain(message: str) -> None:
    for line in message.split("\n"):
        print(f"specrl: {printable(line)}", file=sys.stderr)


if __name__ == "__main__":
    main()
