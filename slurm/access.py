"""Who may read and write a run's folder.

A job imports the code snapshot in it, so that whoever can write there can run commands as its owner. New folders are
therefore private, and a folder that somebody else can write to is refused: `slurm.trust` has the rule.
"""

from __future__ import annotations

import grp
import os
from pathlib import Path

from slurm import trust
from specrl.config import ClusterConfig, ConfigError

PRIVATE = 0o077  # the umask that excludes everybody else
UMASKS = {"owner": PRIVATE, "group": 0o027}  # the umask for each value of `cluster.access`


def restrict(cluster: ClusterConfig) -> None:
    """Restrict access to all files that this process and its children create, as `cluster.access` says."""
    os.umask(UMASKS[cluster.access])


def check_access(run_dir: Path, cluster: ClusterConfig) -> list[str]:
    """Refuse (ConfigError) a folder that others can write to or replace; it need not exist yet.

    Returns a line for each parent folder that members of an untrusted group can write to.
    """
    try:
        if run_dir.is_dir():
            trust.check_run(run_dir)
        return trust.check_place(run_dir, trusted_groups(cluster))
    except (trust.DistrustError, PermissionError) as error:
        raise ConfigError(str(error)) from error


def trusted_groups(cluster: ClusterConfig) -> list[int]:
    """The ids of the groups in `cluster.trusted_groups`; a ConfigError for an unknown one."""
    found = []
    for name in cluster.trusted_groups:
        try:
            found.append(int(name) if name.isdigit() else grp.getgrnam(name).gr_gid)
        except KeyError as error:
            raise ConfigError(f"cluster.trusted_groups = {name!r}: this machine knows no such group") from error
    return found
