"""Who may read and write a run's folder.

A job imports the code snapshot in it, so that whoever can write there can run commands as its owner. New folders are
therefore private, and a folder that somebody else can write to is refused.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from specrl.config import ClusterConfig, ConfigError

PRIVATE = 0o077
"""The file mode creation mask that keeps everybody else out."""
UMASKS = {"owner": PRIVATE, "group": 0o027}
"""The file mode creation mask for each value of `cluster.access`."""


def restrict(cluster: ClusterConfig) -> None:
    """Keep others from all files that this process and its children create, as `cluster.access` says."""
    os.umask(UMASKS[cluster.access])


def check_access(folder: Path) -> None:
    """Refuse a folder to which somebody other than its user can write.

    Raises:
        ConfigError: The folder belongs to somebody else, or its group or everybody may write to it.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{folder} belongs to user {status.st_uid} and not to user {os.geteuid()}, who runs this; jobs run code "
            "from it: choose another runs_dir or name"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"others can write to {folder} (mode {stat.S_IMODE(status.st_mode):o}), and jobs run code from it: "
            f"run `chmod go-w {folder}`, or choose another runs_dir or name"
        )
