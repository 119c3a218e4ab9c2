"""The MLflow runs of a pipeline run: a parent, and a child per stage, which a resubmitted stage continues."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specrl.config import Config, ConfigError, dump_config
from specrl.context import StageContext
from specrl.data.formats.places import files_of
from specrl.keys import flat_settings
from specrl.lifetime import LeftJobError
from specrl.lineage.record import code_of, read_record
from specrl.lineage.source import source_tags
from specrl.tracking.log import Entry, Log, Sent
from specrl.tracking.store import (
    DeletedError,
    check_server,
    connect,
    exists,
    experiment_id,
    import_mlflow,
    run_id_of,
    tracking_uri,
)
from specrl.tracking.sync import Syncing, send
from specrl.tracking.system import LoadMonitor, leave_load, log_load
from specrl.tracking.tracker import Tracker, relative
from specrl.tracking.weights_biases import PATIENCE_SECONDS, WandbSending, send_to_wandb

if TYPE_CHECKING:
    from specrl.distributed import Ranks

logger = logging.getLogger(__name__)
Status = Literal["FINISHED", "FAILED", "KILLED"]

NOTE_TAG, ERROR_TAG = "mlflow.note.content", "specrl.error"
RESPONSES_FILE = "responses.json"  # the artifact with a table of responses
ODD = re.compile(r"[^\w\-. /]")  # characters not allowed in names of metrics
SHORT_PATIENCE_SECONDS, FLOW_PATIENCE_SECONDS, STOP_PATIENCE_SECONDS = 10.0, 60.0, 3.0
"""How long to wait for an unreachable store: at the end of a stage, the start of a flow and in `specrl sync`; at the
end of a flow; and when a flow is interrupted."""
STAGE_LIMIT_SECONDS = 300.0
"""How long a stage holds its allocation for a slow store; the flow sends the rest."""


def start_parent_run(config: Config, description: str = "") -> str:
    """Create the run's MLflow run, or continue the one noted in its folder, and return its id.

    Parameters stay those of the first call. A run with an id continues although its store is unreachable; a new run
    does not begin, because its address is probably wrong. `description` is Markdown.
    """
    is_new = run_id_of(config.run_dir) is None
    import_mlflow()
    if is_new:
        check_server(config)
    until = time.monotonic() + SHORT_PATIENCE_SECONDS
    while (reason := _replace_deleted(config)) and is_new:  # concurrent runs: one creates the experiment
        if time.monotonic() > until:
            raise ConfigError(f"tracking.uri = {tracking_uri(config)}: MLflow takes no run of {config.name}: {reason}")
        time.sleep(0.5)
    log = Log(config.run_dir)
    tracker = Tracker(log)
    tracker.start(config.name, log.first_start().get("tags") or source_tags(config))
    if is_new:  # the description of a continued run includes results
        tracker.log_tags({NOTE_TAG: description})
    tracker.log_params(dict(flat_settings(config)))
    for context, places in (("training", config.data.path), ("validation", config.data.validation_path)):
        for file in files_of(places or ()):
            tracker.log_rollouts(file, file.name, context)
    tracker.log_text(dump_config(config), "config.json")
    send(config, [config.run_dir], SHORT_PATIENCE_SECONDS)
    if (run_id := run_id_of(config.run_dir)) is None:
        raise ConfigError(f"MLflow does not create a run of {config.name}; the log says why")
    return run_id


def _replace_deleted(config: Config) -> str:
    """Send again what was logged to runs since deleted in MLflow; return why MLflow cannot be asked, if so."""
    try:
        client = connect(config)
        experiment_id(client, config)
        folders = [config.run_dir, *stage_folders(config.run_dir)]
        lost = [folder for folder in folders if (run_id := run_id_of(folder)) and not exists(client, run_id)]
        for folder in lost:
            logger.warning("MLflow has lost the run of %s: what is logged is sent again to a new one", folder.name)
        # Without the pipeline's run, those of its stages have lost their parent, which also had their results.
        for folder in folders if config.run_dir in lost else lost:
            Sent(Log(folder)).forget()
    except DeletedError:
        raise
    except Exception as error:  # unreachable, by errors of many libraries; whoever sends something reports it too
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def finish_parent_run(
    config: Config,
    status: Status,
    description: str = "",
    files: Mapping[str, Sequence[Path]] | None = None,  # by artifact folder, "" for the top
    responses: Sequence[Mapping[str, Any]] = (),
) -> None:
    """End the parent run, mark children with an unknown end as killed, and send what waits."""
    for log in unended(config.run_dir):
        Tracker(log).end("KILLED")
    log = Log(config.run_dir)
    sent = {entry.values["path"]: entry.time_ms for entry in log.entries() if entry.kind == "artifact"}
    tracker = Tracker(log)
    tracker.log_tags({NOTE_TAG: description, "specrl.code": code_of(config.run_dir) or ""})
    for folder, path in [(folder, path) for folder, paths in (files or {}).items() for path in paths]:
        # Unchanged files are not logged and sent again each time the run is resumed.
        if sent.get(relative(path, log.owner), 0) <= 1000 * path.stat().st_mtime:
            tracker.log_artifact(path, folder or None)
    if responses:
        tracker.log_table(responses, RESPONSES_FILE)
    tracker.end(status)
    limit_s = STOP_PATIENCE_SECONDS if status == "KILLED" else None  # a user waits for the end
    _sync_or_warn(config, limit_s or FLOW_PATIENCE_SECONDS, limit_s)


def sync_run(config: Config, patience_s: float, limit_s: float | None = None) -> list[str]:
    """Send trackers what they lack of the logs of a run and its stages; safe at any time and repeatedly.

    With a limit, because a user waits, only MLflow gets them. Returns a line for each reason why something is missing.
    Raises DeletedError if the experiment has been deleted.
    """
    import_mlflow()
    if limit_s is None:  # a silent server would take its time to answer
        _replace_deleted(config)
    folders = [config.run_dir, *stage_folders(config.run_dir)]
    lines = []
    if unsent := send(config, folders, patience_s, limit_s):
        names = ", ".join(folder.name for folder in unsent)
        lines.append(f"MLflow does not answer; what {names} logged still waits on disk")
    if refused := [reason for folder in folders for reason in Sent(Log(folder)).now.missing.values() if reason]:
        lines.append(f"MLflow refuses {len(refused)} entries of {config.name}, the first because: {refused[0]}")
    return lines if limit_s is not None or config.tracking.wandb == "off" else lines + send_to_wandb(config, folders)


def _sync_or_warn(config: Config, patience_s: float, limit_s: float | None = None) -> None:
    try:
        lines = sync_run(config, patience_s, limit_s)
    except DeletedError as error:
        lines = [str(error)]
    for line in lines:
        logger.warning("%s; to try again: specrl sync %s", line, config.name)


def log_to_run(
    config: Config, metrics: Mapping[str, float], texts: Mapping[str, str], tags: Mapping[str, str] | None = None
) -> None:
    """Add metrics, tags, and text artifacts by name to a run, ended or not; do nothing without an MLflow run."""
    if run_id_of(config.run_dir) is None:
        return
    tracker = Tracker(Log(config.run_dir))
    if metrics:
        tracker.log_metrics(metrics)
    for name, text in texts.items():
        tracker.log_text(text, name)
    tracker.log_tags(tags or {})
    _sync_or_warn(config, SHORT_PATIENCE_SECONDS)


def row_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    numbers = {column: value for column, value in row.items() if isinstance(value, int | float)}
    return {f"bench/{ODD.sub('_', column)}": float(value) for column, value in numbers.items()}


def stage_folders(run_dir: Path) -> list[Path]:
    """The folders of a run's stages, without links."""
    stages = run_dir / "stages"
    return sorted(path for path in stages.glob("*") if not path.is_symlink()) if not stages.is_symlink() else []


def unended(run_dir: Path) -> list[Log]:
    """The logs of started stages that did not record their end.

    Earlier stages whose MLflow run a current stage continues are left out, because that stage records the end.
    """
    record = read_record(run_dir)
    present = {run_dir / "stages" / key for key in record.stage_keys.values()} if record is not None else set()
    goes_on = {run_id_of(folder) for folder in present} - {None}
    folders = [folder for folder in stage_folders(run_dir) if folder in present or run_id_of(folder) not in goes_on]
    return [log for log in map(Log, folders) if (last := last_of(log)) is not None and last.kind == "start"]


def last_of(log: Log) -> Entry | None:
    """The last start or end entry of a log's run."""
    return next(reversed([entry for entry in log.entries() if entry.kind in ("start", "end")]), None)


@contextmanager
def stage_run(context: StageContext, ranks: Ranks) -> Iterator[Tracker]:
    """Give the stage its child run: RUNNING inside the block, FINISHED after it, FAILED if it raised.

    It stays RUNNING if the stage leaves its job to continue in another. The stage waits for MLflow only briefly, after
    the block.
    """
    nodes = context.stage_dir / "load"
    if not ranks.is_first:
        resources = context.config.resources_of(context.stage)
        node, place = divmod(ranks.rank, resources.ranks_per_node)
        is_watched = resources.nodes > 1 and place == 0  # the first rank of another node
        leave = partial(leave_load, nodes / f"{node}.json")
        with closing(LoadMonitor(leave)) if is_watched else nullcontext():
            yield Tracker()
        return
    import_mlflow()  # not in the thread, because concurrent imports interfere with each other
    log = Log(context.stage_dir)
    tracker = Tracker(log, context.mlflow_run_id, context.config.tracking.max_model_gib)
    tracker.start(context.stage, {"specrl.key": context.key, "specrl.host": os.uname().nodename})
    syncing, sending = Syncing(context.config, log), WandbSending(context.config, log)
    began_ms = next((entry.time_ms for entry in log.entries()), round(1000 * time.time()))
    monitor = LoadMonitor(partial(log_load, tracker, began_ms, nodes))
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
        # A job that is being left has little time.
        if not syncing.close(SHORT_PATIENCE_SECONDS, STAGE_LIMIT_SECONDS if status else SHORT_PATIENCE_SECONDS):
            logger.warning("some of what %s logged waits for its next job, the flow or specrl sync", context.key)
        if (reason := sending.close(PATIENCE_SECONDS if status else SHORT_PATIENCE_SECONDS)) is not None:
            logger.warning(
                "W&B lacks some of what %s logged (%s); the next job or the flow sends it", context.key, reason
            )
