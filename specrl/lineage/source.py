"""Where a run comes from: its command, user, code and data, as tags and data sets of MLflow."""

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


def source_tags(config: Config) -> dict[str, str]:
    """The tags that say who started the run with which command, but for secrets, and the git revision of the code.

    Called where the run is started: the jobs, and a run that is resumed, import a copy of the code without revision.
    """
    command = shlex.join([Path(sys.argv[0]).name, *map(redacted, sys.argv[1:])])
    record = read_record(config.run_dir)
    tags = {
        "mlflow.source.name": command,
        "mlflow.source.type": "LOCAL" if config.cluster.backend == "local" else "JOB",
        "mlflow.user": os.environ.get("USER") or str(os.getuid()),
        "specrl.host": os.uname().nodename,
        **{f"specrl.data.{name}": value for name, value in data_digests(config).items()},
        **({"specrl.origin": record.origin.words} if record is not None and record.origin is not None else {}),
    }
    return tags | git_tags(Path(specrl.__file__).parents[1])


def git_tags(root: Path) -> dict[str, str]:
    """The revision of a git checkout, and whether its files were changed; nothing where `root` is none."""
    git = partial(output_of, "git", "-C", str(root), seconds=GIT_SECONDS)
    commit, folder = git("rev-parse", "HEAD"), git("rev-parse", "--show-toplevel")
    if not commit or not folder or Path(folder).resolve() != root.resolve():
        return {}  # such as the copy of the code in a run's folder, inside a checkout of something else
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {
        "mlflow.source.git.commit": commit,
        "mlflow.source.git.branch": git("rev-parse", "--abbrev-ref", "HEAD") or "",
        "specrl.code.changed": "unknown" if changed is None else str(bool(changed)).lower(),
    }


def data_digests(config: Config) -> dict[str, str]:
    """A digest of each data file, or of the section `data` where the prompts come from generators."""
    named = named_files(config)
    found = {"training": named.get("data.path"), "validation": named.get("data.validation_path")}
    if any(found.values()):
        return {name: content for name, content in found.items() if content is not None}
    return {"training": digest(config.settings["data"])}
