"""The origin of a run: command, user, code and data, as MLflow tags and data sets."""

from __future__ import annotations

import os
import shlex
import sys
from functools import partial
from pathlib import Path

import specrl
from specrl.artifacts import digest
from specrl.config import Config
from specrl.config.text import redacted
from specrl.keys import named_files
from specrl.lineage.record import read_record
from specrl.processes import output_of

GIT_SECONDS = 10
DATA = {"training": "data.path", "validation": "data.validation_path"}


def source_tags(config: Config) -> dict[str, str]:
    """Tags for the user, the command (without secrets) and the code's git revision.

    Call this where the run is started: jobs and resumed runs import a copy of the code without a revision.
    """
    command = shlex.join([Path(sys.argv[0]).name, *map(redacted, sys.argv[1:])])
    record = read_record(config.run_dir)
    named = named_files(config) if record is None else record.files
    data = {name: named[key] for name, key in DATA.items() if key in named}
    data = data or {"training": digest(config.settings["data"])}  # prompts come from generators
    tags = {
        "mlflow.source.name": command,
        "mlflow.source.type": "LOCAL" if config.cluster.backend == "local" else "JOB",
        "mlflow.user": os.environ.get("USER") or str(os.getuid()),
        "specrl.host": os.uname().nodename,
        **{f"specrl.data.{name}": value for name, value in data.items()},
        **({"specrl.origin": record.origin.words} if record is not None and record.origin is not None else {}),
    }
    return tags | git_tags(Path(specrl.__file__).parents[1])


def git_tags(root: Path) -> dict[str, str]:
    """The revision of a git checkout, and whether files were changed; empty if `root` is no checkout."""
    git = partial(output_of, "git", "-C", str(root), seconds=GIT_SECONDS)
    commit, folder = git("rev-parse", "HEAD"), git("rev-parse", "--show-toplevel")
    if not commit or not folder or Path(folder).resolve() != root.resolve():
        return {}  # such as a run's copy of the code inside some other checkout
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {
        "mlflow.source.git.commit": commit,
        "mlflow.source.git.branch": git("rev-parse", "--abbrev-ref", "HEAD") or "",
        "specrl.code.changed": "unknown" if changed is None else str(bool(changed)).lower(),
    }
