"""Which file systems several hosts share, where neither SQLite's databases nor, on some, locks are safe."""

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
)  # as Linux calls them
SERVER = "tracking.uri = the address of an MLflow server (mlflow server --backend-store-uri sqlite:////LOCAL/mlflow.db)"


FULL = {
    errno.ENOSPC: "is full (df and df -i say of what)",
    errno.EDQUOT: "has no room left for you: your quota is used up",
    errno.EFBIG: "takes no file of this length from this process (ulimit -f)",
}
"""The errors of a file system that takes no more, and what they say of it."""


def lack_of_room(error: BaseException) -> str:
    """What is the matter with a file system that took no more, by its mount point; empty for any other error."""
    if not isinstance(error, OSError) or (words := FULL.get(error.errno or 0)) is None:
        return ""
    is_path = isinstance(error.filename, str | bytes | os.PathLike)  # which a number of an open file is not
    point, kind = mount_of(Path(os.fsdecode(error.filename if is_path else ".")))
    return f"the file system {point} ({kind}) {words}"


def file_system(path: Path) -> str:
    """The type of the file system on which a path lies or would be made, such as ext4; empty where nobody says."""
    return mount_of(path)[1]


def mount_of(path: Path) -> tuple[str, str]:
    """The mount point and the type of the file system of a path; empty texts where nobody says."""
    place, best = existing(path).resolve(), ("", "")
    for line in MOUNTS.read_text().splitlines() if MOUNTS.exists() else ():
        fields, _, kind = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        if place.is_relative_to(point) and len(point) >= len(best[0]):
            best = point, kind.split()[0]
    return best


def existing(path: Path) -> Path:
    """A path or, where nothing is there yet, the innermost folder above it that is."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def is_shared(path: Path) -> bool:
    """Whether a path lies on a file system that several hosts may have mounted."""
    return SHARED.fullmatch(file_system(path)) is not None


def has_locks(folder: Path) -> bool:
    """Whether a process can hold a file in an existing folder by `flock`, as a flow does with its run."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                return False
            raise
    return True


def prefect_home(runs_dir: Path) -> Path:
    """The folder of Prefect's database, which has nothing that the runs do not: beside them, or of this node alone."""
    return node_folder() / "prefect" if is_shared(runs_dir) else runs_dir.absolute() / ".prefect"


def shared_database(runs_dir: Path, tracking_uri: str | None) -> str | None:
    """One line about an MLflow database that jobs on several hosts would write, or None."""
    if tracking_uri is not None and not tracking_uri.startswith("sqlite:///"):
        return None
    database = Path(tracking_uri.removeprefix("sqlite:///")) if tracking_uri else runs_dir.absolute() / "mlflow.db"
    if not is_shared(database):
        return None
    return f"MLflow's {database} lies on {file_system(database)}, where several hosts damage it: set {SERVER}"
