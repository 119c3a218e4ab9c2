"""Detects shared file systems, on which SQLite databases and sometimes locks are unsafe."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from pathlib import Path

from specrl.processes import node_folder

MOUNTS = Path("/proc/self/mountinfo")
SHARED = re.compile(
    r"(fuse\.)?(nfs4?|lustre|gpfs|beegfs|cifs|smb3?|ceph(fs)?|wekafs|glusterfs|pvfs2|orangefs|panfs|afs|sshfs|daos|"
    r"juicefs|vast\w*|ocfs2|gfs2)"
)  # Linux's names
SERVER = "tracking.uri = the address of an MLflow server (mlflow server --backend-store-uri sqlite:////LOCAL/mlflow.db)"


FULL = {
    errno.ENOSPC: "is full (df and df -i say of what)",
    errno.EDQUOT: "has no room left for you: your quota is used up",
    errno.EFBIG: "takes no file of this length from this process (ulimit -f)",
}
"""The errors of a file system without room, and their meanings."""


def lack_of_room(error: BaseException) -> str:
    """Why a file system has no room, with its mount point; empty for any other error."""
    if not isinstance(error, OSError) or (words := FULL.get(error.errno or 0)) is None:
        return ""
    is_path = isinstance(error.filename, str | bytes | os.PathLike)  # not for a file descriptor
    point, kind = mount_of(Path(os.fsdecode(error.filename if is_path else ".")))
    return f"the file system {point} ({kind}) {words}"


def file_system(path: Path) -> str:
    """The file system type, such as ext4, where a path is or would be created; empty if unknown."""
    return mount_of(path)[1]


def mount_of(path: Path) -> tuple[str, str]:
    """The mount point and file system type of a path; empty if unknown."""
    place, best = existing(path).resolve(), ("", "")
    for line in MOUNTS.read_text().splitlines() if MOUNTS.exists() else ():
        fields, _, kind = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        if place.is_relative_to(point) and len(point) >= len(best[0]):
            best = point, kind.split()[0]
    return best


def existing(path: Path) -> Path:
    """A path or, if it does not exist, the innermost existing folder above it."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def is_shared(path: Path) -> bool:
    """Whether several hosts may have mounted a path's file system."""
    return SHARED.fullmatch(file_system(path)) is not None


def has_locks(folder: Path) -> bool:
    """Whether a process can lock a file in an existing folder by `flock`, as a flow does with its run."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                return False
            raise
    return True


def prefect_home(runs_dir: Path) -> Path:
    """The folder of Prefect's database, which holds nothing essential: beside the runs, or local to this node."""
    return node_folder() / "prefect" if is_shared(runs_dir) else runs_dir.absolute() / ".prefect"


def shared_database(runs_dir: Path, tracking_uri: str | None) -> str | None:
    """One line about an MLflow database to which jobs on several hosts would write, or None."""
    if tracking_uri is not None and not tracking_uri.startswith("sqlite:///"):
        return None
    database = Path(tracking_uri.removeprefix("sqlite:///")) if tracking_uri else runs_dir.absolute() / "mlflow.db"
    if not is_shared(database):
        return None
    return f"MLflow's {database} lies on {file_system(database)}, where several hosts damage it: set {SERVER}"
