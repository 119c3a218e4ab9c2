"""Which file systems several hosts share, where neither SQLite's databases nor, on some, locks are safe."""

from __future__ import annotations

import errno
import fcntl
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


def file_system(path: Path) -> str:
    """The type of the file system on which a path lies or would be made, such as ext4; empty where nobody says."""
    place, best = existing(path).resolve(), ("", "")
    for line in MOUNTS.read_text().splitlines() if MOUNTS.exists() else ():
        fields, _, kind = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        if place.is_relative_to(point) and len(point) >= len(best[0]):
            best = point, kind.split()[0]
    return best[1]


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
