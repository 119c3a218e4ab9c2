"""A copy of the code in the run's folder. Jobs run it, so that editing sources does not change a job that waits."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from specrl.keys import files_digest

PACKAGES = ("specrl", "slurm")
"""The packages that run in a job. They lie in one folder, as in a checkout."""


def snapshot_code(run_dir: Path) -> Path:
    """Copy the packages to `run_dir/code/DIGEST`, unless they are there already, and return that folder."""
    root = Path(__file__).parents[1]
    target = run_dir / "code" / files_digest(_files(root))
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".copying-", dir=target.parent))
    temporary.chmod(0o755)
    try:
        for package in PACKAGES:
            shutil.copytree(root / package, temporary / package, ignore=shutil.ignore_patterns("__pycache__"))
        temporary.rename(target)
    except OSError:
        if not target.is_dir():  # else another flow was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    for package in PACKAGES:
        for path in (root / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, str(path.relative_to(root))
