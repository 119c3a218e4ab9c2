"""The folders of runs: how a run is found, which flow holds it, and what is written when it starts."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from slurm.access import check_access, restrict
from specrl.artifacts import read_file, read_json, read_object, write_text
from specrl.config import ClusterConfig, Config, ConfigError, dump_config, parse_config
from specrl.config.base import Section
from specrl.config.cluster import ContainerConfig
from specrl.data.formats.places import absolute_place
from specrl.lineage.record import is_copy, own_copy
from specrl.processes import is_locked
from specrl.report.results import CONFIG_FILE, is_run, readable_config
from specrl.tracking.log import FOLDER as TRACKING
from specrl.tracking.runs import stage_folders
from specrl.tracking.store import RUN_ID_FILE, uri_of_environment

LOCK_FILE = ".flow.lock"
LOCK_SECONDS = 1  # `specrl watch` and `specrl ls` hold the lock for an instant
OUTCOME_FILE = "outcome.json"  # how the last flow ended; absent while one runs, or if it was killed
HOLDER = re.compile(r"process (\d+) on (\S+)")
HOLDER_FILE = ".flow.holder"  # the process that holds the lock, for error messages of others


def anchor(config: Config) -> Config:
    """Make all paths of a configuration absolute, because jobs and later commands run in other folders."""
    anchored: Config = _anchored(config, config.runs_dir)
    for name in ("model", "drafter"):
        source = getattr(anchored, name).source
        if source is not None and (folder := Path(source)).is_dir():
            anchored = anchored.updated(**{name: {"source": str(folder.absolute())}})
    container = anchored.cluster.container
    if container is not None and _is_here(container):  # pyxis takes a name without / for an address
        container = container.model_copy(update={"image": str(Path(container.image).absolute())})
        anchored = anchored.updated(cluster={"container": container})
    if anchored.tracking.uri is None:  # for jobs, and for commands in other shells
        anchored = anchored.updated(tracking={"uri": uri_of_environment()})
    parse_config(anchored.settings)  # the current folder may also have a name that is not allowed in settings
    return anchored


def _is_here(container: ContainerConfig) -> bool:
    image = Path(container.image)
    with contextlib.suppress(OSError):  # such as for a name that is too long
        return image.exists() if container.kind == "apptainer" else image.is_file()
    return False


def _anchored(value: Any, runs_dir: Path) -> Any:
    if isinstance(value, Path):
        return value.absolute()
    if isinstance(value, tuple):
        return tuple(absolute_place(place, runs_dir) if isinstance(place, Path) else place for place in value)
    if isinstance(value, dict):
        return {name: _anchored(entry, runs_dir) for name, entry in value.items()}
    if isinstance(value, Section):
        found = {name: _anchored(entry, runs_dir) for name, entry in value}
        return value.model_copy(update={name: entry for name, entry in found.items() if entry != getattr(value, name)})
    return value


def find_own_run(name: str, runs_dir: Path) -> Path:
    """Find a run that belongs only to the user, whose code may run and whose files may change, or a ConfigError.

    Every command that takes a run calls this or `find_run_to_read`. Files that this process writes afterwards are as
    private as the run.
    """
    run_dir = find_run_to_read(name, runs_dir)
    cluster = readable_config(run_dir).cluster
    check_access(run_dir, cluster)
    restrict(cluster)
    return run_dir


def find_run_to_read(name: str, runs_dir: Path) -> Path:
    """Find anybody's run, in which nothing may be executed, imported, unpickled or written."""
    for folder in (runs_dir / name, Path(name)):
        if is_run(folder):
            return folder.absolute()
    known = ", ".join(sorted(folder.name for folder in list_runs(runs_dir))) or "none"
    raise ConfigError(f"no run {name} in {runs_dir.absolute()}; its runs: {known}")


def is_trusted(run_dir: Path) -> bool:
    """Whether a run belongs only to the user, as `find_own_run` requires."""
    try:
        check_access(run_dir, readable_config(run_dir).cluster)
    except ConfigError:
        return False
    return True


def list_runs(runs_dir: Path) -> list[Path]:
    """The folders of everybody's runs, those with the most recently written configuration first."""
    runs = [path.parent for path in runs_dir.glob(f"*/{CONFIG_FILE}") if is_run(path.parent)]
    return sorted(runs, key=lambda run_dir: (run_dir / CONFIG_FILE).stat().st_mtime, reverse=True)


def list_unreadable(runs_dir: Path) -> list[Path]:
    """The folders with stages, but without a readable record or configuration."""
    paths = (path for path in runs_dir.glob(f"*/{CONFIG_FILE}") if path.is_file() and (path.parent / "stages").is_dir())
    return sorted(path.parent for path in paths if not is_run(path.parent) and read_json(path) is None)


def write_config(config: Config) -> None:
    """Write the configuration into the run's folder, which is created if necessary."""
    write_text(config.run_dir / CONFIG_FILE, dump_config(config))


@contextmanager
def only_flow(run_dir: Path, cluster: ClusterConfig) -> Iterator[None]:
    """Lock the run until this process ends in any way; a ConfigError if another holds it or others can change it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    check_access(run_dir, cluster)
    holder = run_dir / HOLDER_FILE
    try:
        lock = FileLock(run_dir / LOCK_FILE).acquire(timeout=LOCK_SECONDS)
    except Timeout:
        who = holder.read_text() if holder.exists() else "another process"
        raise ConfigError(f"run {run_dir.name} is already being worked on by {who}; end that first") from None
    with lock:
        write_text(holder, f"process {os.getpid()} on {os.uname().nodename}")
        if is_copy(run_dir):
            _part_from_original(run_dir)
        yield


def _part_from_original(run_dir: Path) -> None:
    for folder in (run_dir, *stage_folders(run_dir)):
        for sent in (folder / TRACKING).glob("sent-*.json"):
            sent.unlink()  # everything is sent once more, to an MLflow run of its own
        (folder / RUN_ID_FILE).unlink(missing_ok=True)
    own_copy(run_dir)
    print(f"note: {run_dir} is a copy: a run of its own from now on, in MLflow, too", file=sys.stderr)


def holder_of(run_dir: Path) -> int | None:
    """This host's process that holds or last held the run, or None."""
    try:
        found = HOLDER.fullmatch(read_file(run_dir / HOLDER_FILE).decode())
    except (OSError, ValueError):
        return None
    return int(found[1]) if found and found[2] == os.uname().nodename else None


def is_worked_on(run_dir: Path) -> bool:
    """Whether a flow holds the run."""
    return is_locked(run_dir / LOCK_FILE)


def outcome_of(run_dir: Path) -> dict[str, str]:
    """The contents of `outcome.json`: the `state` in which the last flow left the run, and its `error`."""
    found = read_object(run_dir / OUTCOME_FILE)
    return found and {name: str(found.get(name, "")) for name in ("state", "error")}


def size_of(path: Path) -> int:
    """The bytes of a file, or of all distinct files below a folder, without following links."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a job has just replaced it
                state = Path(folder, name).lstat()
                seen[state.st_dev, state.st_ino] = state.st_size
    return sum(seen.values())
