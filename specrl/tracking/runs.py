"""The MLflow runs of a pipeline run: one parent, and a child for each stage, which a resubmitted stage continues."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specrl.config import Config, ConfigError, dump_config
from specrl.context import StageContext
from specrl.data.places import files_of
from specrl.lifetime import LeftJobError
from specrl.lineage.record import code_of, read_record
from specrl.tracking.sender import needs_repair, repair
from specrl.tracking.source import read_source, source_tags, write_source
from specrl.tracking.spool import Spool
from specrl.tracking.store import RUN_ID_FILE, check_server, connect, experiment_id, import_mlflow
from specrl.tracking.system import SystemMonitor
from specrl.tracking.tracker import Silent, SpoolTracker, Tracker
from specrl.tracking.uploader import Uploader, send

if TYPE_CHECKING:
    from specrl.distributed import Ranks

logger = logging.getLogger(__name__)
Status = Literal["FINISHED", "FAILED", "KILLED"]
Files = Mapping[str, Sequence[Path]]

NOTE_TAG = "mlflow.note.content"

STAGE_PATIENCE_SECONDS, FLOW_PATIENCE_SECONDS, RESUME_PATIENCE_SECONDS = 10.0, 60.0, 10.0
"""For how long a store that is away is waited for at the end of a stage, at the end of the flow, and at its start."""
SYNC_PATIENCE_SECONDS, STOP_PATIENCE_SECONDS = 10.0, 3.0
"""The same for `specrl sync`, and for a flow that is interrupted."""


def start_parent_run(config: Config, description: str = "") -> str:
    """Create the run's MLflow run, or continue the one noted in its folder, and return its id.

    Database, experiment and artifact folder are made where they do not exist yet. Parameters are those of the first
    call. A run that has an id already goes on although its store is away; a new one does not begin, as its address is
    probably wrong.

    Args:
        description: What the page of a new run shows first, in Markdown.

    Raises:
        ConfigError: The tracking server of a new run does not answer.
    """
    path = config.run_dir / RUN_ID_FILE
    import_mlflow()
    if not path.exists():
        check_server(config)
    for line in repair_run(config):
        logger.warning("%s", line)
    write_source(config.run_dir, source_tags(config))
    tracker = SpoolTracker(Spool(config.run_dir), None)
    note = {} if path.exists() else {NOTE_TAG: description}  # a run that goes on has a description with results
    tracker.start(config.name, {**read_source(config.run_dir), **note})
    tracker.log_params(flatten(json.loads(dump_config(config))))
    for context, places in (("training", config.data.path), ("validation", config.data.validation_path)):
        for file in files_of(places or ()):
            tracker.log_rollouts(file, file.name, context)
    tracker.log_text(dump_config(config), "config.json")
    send(config, [config.run_dir], RESUME_PATIENCE_SECONDS)
    if not path.exists():
        raise ConfigError(f"MLflow does not create a run of {config.name}; the log says why")
    return path.read_text().strip()


def finish_parent_run(config: Config, status: Status, description: str = "", files: Files | None = None) -> None:
    """End the parent run, and mark as killed those children that could not say how they ended.

    What the stages could not send is sent now, with a bounded patience.

    Args:
        description: What the run's page shows first, in Markdown.
        files: The files that become artifacts of the run, by the artifacts' folders; "" is the top.
    """
    import_mlflow()
    for spool in unended(config.run_dir):
        SpoolTracker(spool, None).end("KILLED")
    tracker = SpoolTracker(Spool(config.run_dir), None)
    tracker.log_tags({NOTE_TAG: description, "specrl.code": code_of(config.run_dir) or ""})
    log_artifacts(tracker, files or {})
    tracker.end(status)
    folders = [config.run_dir, *stage_folders(config.run_dir)]
    if status == "KILLED":  # somebody waits for the end
        unsent = send(config, folders, STOP_PATIENCE_SECONDS, limit_s=STOP_PATIENCE_SECONDS)
    else:
        unsent = send(config, folders, FLOW_PATIENCE_SECONDS)
    if unsent:
        names = ", ".join(folder.name for folder in unsent)
        logger.warning("some of what %s logged waits on disk for MLflow: specrl sync %s", names, config.name)


def log_files(config: Config, files: Files) -> None:
    """Make files artifacts of a run that has ended or goes on; a run that MLflow does not know is left alone."""
    if not (config.run_dir / RUN_ID_FILE).exists():
        return
    import_mlflow()
    log_artifacts(SpoolTracker(Spool(config.run_dir), None), files)
    if send(config, [config.run_dir], RESUME_PATIENCE_SECONDS):
        logger.warning("MLflow is away; the files wait on disk: specrl sync %s", config.name)


def log_artifacts(tracker: SpoolTracker, files: Files) -> None:
    """Make files artifacts of the tracker's run."""
    for folder, paths in files.items():
        for path in paths:
            tracker.log_artifact(path, folder or None)


def repair_run(config: Config) -> list[str]:
    """Have everything sent again that MLflow has lost, or refused because something was deleted; a line for each.

    Raises:
        DeletedError: The experiment has been deleted.
    """
    from mlflow.exceptions import MlflowException

    lines = []
    try:
        client = connect(config)
        experiment_id(client, config)
        for folder in [config.run_dir, *stage_folders(config.run_dir)]:
            if needs_repair(client, folder):
                repair(folder)
                lines.append(f"MLflow has lost or refused what {folder.name} logged; it is sent again")
    except MlflowException:  # it is away: what is sent later is looked at then
        return lines
    return lines


def sync_run(config: Config) -> list[Path]:
    """Send everything that a run and its stages have logged; return the folders of which something still waits.

    Raises:
        DeletedError: The experiment has been deleted.
    """
    import_mlflow()
    for line in repair_run(config):
        logger.warning("%s", line)
    return send(config, [config.run_dir, *stage_folders(config.run_dir)], SYNC_PATIENCE_SECONDS)


def stage_folders(run_dir: Path) -> list[Path]:
    """Return the folders of a run's stages. A link is none."""
    stages = run_dir / "stages"
    return sorted(path for path in stages.glob("*") if not path.is_symlink()) if not stages.is_symlink() else []


def unended(run_dir: Path) -> list[Spool]:
    """Return the spools of the stages that have started and could not say how they ended.

    Left out are those of earlier stages whose MLflow run a present stage goes on with: how it ended is for that to say.
    """
    record = read_record(run_dir)
    present = {run_dir / "stages" / key for key in record.stage_keys.values()} if record is not None else set()
    goes_on = {_run_id(folder) for folder in present} - {None}
    folders = [folder for folder in stage_folders(run_dir) if folder in present or _run_id(folder) not in goes_on]
    return [spool for spool in map(Spool, folders) if last_of(spool) == "start"]


def _run_id(folder: Path) -> str | None:
    path = folder / RUN_ID_FILE
    return path.read_text().strip() if path.exists() else None


def last_of(spool: Spool) -> str | None:
    """Return whether the last thing that a spool says of its run is its `start` or its `end`; None without either."""
    kinds = [entry.kind for entry in spool.everything() if entry.kind in ("start", "end")]
    return kinds[-1] if kinds else None


@contextmanager
def stage_run(context: StageContext, ranks: Ranks) -> Iterator[Tracker]:
    """Give the stage its child run: RUNNING inside the block, FINISHED after it, FAILED when it raised.

    It stays RUNNING when the stage leaves its job to go on in another one. A stage that was killed continues its child,
    whose id lies in the stage's folder. The stage never waits for MLflow except, for a short time, after the block.
    """
    if not ranks.is_first:
        yield Silent()
        return
    import_mlflow()  # here and not in the thread: two threads that import at a time disturb each other
    spool = Spool(context.stage_dir)
    tracker = SpoolTracker(spool, context.mlflow_run_id, context.config.tracking.max_model_gib)
    tracker.start(context.stage, {"specrl.key": context.key, "specrl.host": os.uname().nodename})
    uploader, monitor = Uploader(context.config, spool), SystemMonitor(tracker, spool.began_ms())
    status: Status | None = "FAILED"
    try:
        yield tracker
        status = "FINISHED"
    except LeftJobError:
        status = None
        raise
    finally:
        monitor.close()
        if status is not None:
            tracker.end(status)
        # A job that is left has little time.
        if not uploader.close(STAGE_PATIENCE_SECONDS, None if status else STAGE_PATIENCE_SECONDS):
            logger.warning("some of what %s logged waits for its next job, the flow or specrl sync", context.key)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted names, such as `train.num_steps`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
