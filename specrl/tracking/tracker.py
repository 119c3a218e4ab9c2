"""The logging interface of a stage. It writes to the log on disk, so that no server outage affects the stage."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from specrl.artifacts import write_text
from specrl.metrics import find_metric
from specrl.tracking.log import FILES_FOLDER, Log

logger = logging.getLogger(__name__)

GIB = 2**30
WEIGHTS = "*.safetensors"
TABLES_TAG = "mlflow.loggedArtifacts"
TENSORBOARD = "tensorboard"  # a folder of the run


class Tracker:
    """The run of a stage, a child of the pipeline's run, or that run itself. Nothing here waits for a server or fails
    because of it."""

    def __init__(self, log: Log | None = None, parent_id: str | None = None, max_model_gib: float = 0.0) -> None:
        """Log to `log`, or nowhere. `parent_id` is the pipeline's run; models up to `max_model_gib` include weights."""
        self._log, self._parent_id, self._max_model_gib = log, parent_id, max_model_gib
        self._events = None if log is None else EventFile(log)
        self._lost = 0

    def start(self, name: str, tags: Mapping[str, str]) -> None:
        """Create the run, or continue it."""
        self._append("start", name=name, tags=dict(tags), parent=self._parent_id)

    def end(self, status: str) -> None:
        """End the run with one of MLflow's statuses, such as FINISHED."""
        self._append("end", status=status)

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Log metrics that `specrl.metrics` defines."""
        unknown = [name for name in metrics if find_metric(name) is None]
        assert not unknown, f"metrics that specrl.metrics does not define: {unknown}"
        values = {name: float(value) for name, value in metrics.items()}
        self._append("metrics", metrics=values, step=step)
        if (events := self._events) is not None:
            try:
                events.write(values, step)
            except OSError:  # disk full, as `_append` warns
                pass
            except Exception as error:  # tensorboardX and protobuf document no errors, and none may end a training
                logger.warning("TensorBoard has no more metrics of %s: %r", events.folder, error)
                self._events = None

    def log_new_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log a step's metrics at once, except those already logged by this or an earlier start of the stage.

        A repeated step yields the same metrics.
        """
        if new := {name: value for name, value in metrics.items() if step > self._last_steps.get(name, -1)}:
            self.log_metrics(new, step)
            self.flush()
            self._last_steps |= dict.fromkeys(new, step)

    @cached_property
    def _last_steps(self) -> dict[str, int]:
        last: dict[str, int] = {}
        for entry in self._log.entries() if self._log is not None else ():
            if entry.kind == "metrics":
                last |= {name: max(entry.values["step"], last.get(name, -1)) for name in entry.values["metrics"]}
        return last

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters. MLflow never changes one, so the first value stays if a stage is resubmitted."""
        self._append("params", params={name: str(value) for name, value in params.items()})

    def log_tags(self, tags: Mapping[str, str]) -> None:
        self._append("tags", tags=dict(tags))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Log a file, or all files in a directory, below `folder` in the run's artifacts.

        Files in the pipeline run's folder are sent from there, in their state at that time.
        """
        self._write(lambda log: log.append("artifact", path=relative(path, log.owner), folder=folder))

    def log_text(self, text: str, name: str) -> None:
        """Save a text as the artifact `name`, such as `config.json`."""

        def write(log: Log) -> None:
            path = log.folder / FILES_FOLDER / name
            write_text(path, text)
            log.append("artifact", path=relative(path, log.owner), folder=name.rpartition("/")[0] or None)

        self._write(write)

    def log_table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Save rows with equal columns as the artifact `name`, which MLflow shows as a table."""
        columns = list(rows[0])
        table = {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
        self.log_text(json.dumps(table), name)
        self.log_tags({TABLES_TAG: json.dumps([{"path": name, "type": "table"}])})

    def log_rollouts(self, path: Path, name: str, context: str = "training") -> None:
        """Record an Arrow file, or a folder of them, as a data set of the run: its location and digest."""

        def record(log: Log) -> None:
            is_inside = path.absolute().is_relative_to(log.owner.absolute())
            source = relative(path, log.owner) if is_inside else str(path.absolute())
            log.append("dataset", source=source, name=name, context=context)

        self._write(record)

    def register_model_version(self, name: str, directory: Path, tags: Mapping[str, str], folder: str = "") -> None:
        """Upload a directory and register it as a version of model `name`, once per `folder`.

        Weights above `tracking.max_model_gib` are not uploaded; a tag gives their location. MLflow calls the newest
        version `latest`; the one with the highest `specrl.score` is `best`. The artifact folder `folder` defaults to
        the directory's name.
        """

        def register(log: Log) -> None:
            size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            without = WEIGHTS if size > self._max_model_gib * GIB else ""
            own = {**tags, "specrl.location": str(directory)}
            path, to = relative(directory, log.owner), folder or directory.name
            log.append("model", path=path, folder=to, without=without, name=name, tags=own)

        self._write(register)

    def flush(self) -> None:
        """Flush the log to disk; call this after each step, so that a lost node loses no metrics."""
        self._write(Log.flush)

    def _append(self, kind: str, **values: Any) -> None:
        self._write(lambda log: log.append(kind, **values))

    def _write(self, write: Callable[[Log], None]) -> None:
        if self._log is None:
            return
        try:
            write(self._log)
        except OSError as error:
            if not self._lost:
                logger.warning(
                    "%s: %s; what is logged is lost until there is room again, and nothing else is affected",
                    self._log.folder,
                    error,
                )
            self._lost += 1
            return
        if self._lost:
            logger.warning("%s can be written again; %d entries were lost", self._log.folder, self._lost)
            self._lost = 0


class EventFile:
    """The metrics that one process logs for a run or a stage, as TensorBoard's file in `RUN/tensorboard/OWNER`."""

    def __init__(self, log: Log) -> None:
        run_dir = log.owner.parent.parent if log.owner.parent.name == "stages" else log.owner
        self._log, self.folder = log, run_dir / TENSORBOARD / log.owner.name
        self._lock = threading.Lock()
        self._writer: Any = None

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Write logged metrics; an OSError if the disk fails, or whatever tensorboardX raises."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        with self._lock:
            if self._writer is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                # Its name has the time in whole seconds: the size of the log keeps two processes of a second apart.
                self._writer = EventsWriter(str(self.folder / "events"), f".{self._log.path.stat().st_size}")
            self._writer.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            self._writer.flush()


def relative(path: Path, folder: Path) -> str:
    """A path relative to the folder of the entries' run, which may be moved."""
    return os.path.relpath(path.absolute(), folder.absolute())
