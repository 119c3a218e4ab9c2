"""What a stage logs with. Everything goes to the stage's spool first, so that no outage of MLflow reaches the stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from specrl.metrics import find_metric
from specrl.tracking.spool import Spool
from specrl.tracking.store import is_headline

logger = logging.getLogger(__name__)

GIB = 2**30
WEIGHTS = "*.safetensors"


class Tracker(Protocol):
    """The MLflow run of a stage, a child of the pipeline's. Nothing here waits for MLflow or raises because of it."""

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Log metrics, whose names `specrl.metrics` must define; those of `is_headline` to the pipeline's run too."""

    def log_run_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log results of the whole pipeline run: to the parent run, and to the stage's own run."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters. MLflow never changes one: where a stage was submitted again, the first value stays."""

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the stage's run."""

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Log a file, or everything in a directory, as it is now, below `folder` of the run's artifacts."""

    def log_figure(self, figure: Any, name: str) -> None:
        """Save a matplotlib figure as the artifact `name`, such as `calibration/errors.png`."""

    def log_rollouts(self, path: Path, name: str, context: str = "training") -> None:
        """Record an Arrow file, or a folder of them, as a data set of the run: where it lies and its digest."""

    def register_model_version(self, name: str, directory: Path, tags: Mapping[str, str], folder: str = "") -> None:
        """Upload a directory and register it as a version of the model `name`, only once for each `folder`.

        Args:
            folder: The folder of the run's artifacts; by default the directory's name.

        The weights of a model above `tracking.max_model_gib` stay where they are, which a tag tells.
        MLflow calls the newest version `latest`. The one with the highest `specrl.score` among its tags is `best`.
        `registered_version` tells its number as soon as there is one.
        """

    def flush(self) -> None:
        """Write what was logged to disk; call it when a step is complete, so that a lost node loses none."""


class Silent:
    """The tracker of ranks that do not log."""

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        check_names(metrics)

    def log_run_metrics(self, metrics: Mapping[str, float]) -> None:
        check_names(metrics)

    def log_params(self, params: Mapping[str, Any]) -> None: ...

    def log_tags(self, tags: Mapping[str, str]) -> None: ...

    def log_artifact(self, path: Path, folder: str | None = None) -> None: ...

    def log_figure(self, figure: Any, name: str) -> None: ...

    def log_rollouts(self, path: Path, name: str, context: str = "training") -> None: ...

    def register_model_version(self, name: str, directory: Path, tags: Mapping[str, str], folder: str = "") -> None: ...

    def flush(self) -> None: ...


class SpoolTracker:
    """The tracker of the first rank, and of the flow for the pipeline's own run."""

    def __init__(self, spool: Spool, parent_id: str | None, max_model_gib: float = 0.0) -> None:
        """Log to a spool.

        Args:
            parent_id: The MLflow run of the pipeline; None for the pipeline's own tracker.
            max_model_gib: The size up to which models are uploaded with their weights.
        """
        self._spool, self._parent_id, self._max_model_gib = spool, parent_id, max_model_gib
        self._lost = 0

    def start(self, name: str, tags: Mapping[str, str]) -> None:
        """Create the run, or continue it."""
        self._append("start", name=name, tags=dict(tags), parent=self._parent_id)

    def end(self, status: str) -> None:
        """End the run with one of MLflow's statuses, such as FINISHED."""
        self._append("end", status=status)

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        self._log_metrics(None, metrics, step)
        headlines = {name: value for name, value in metrics.items() if is_headline(name)}
        if headlines and self._parent_id is not None:
            self._log_metrics(self._parent_id, headlines, step)

    def log_run_metrics(self, metrics: Mapping[str, float]) -> None:
        self._log_metrics(None, metrics, 0)
        if self._parent_id is not None:
            self._log_metrics(self._parent_id, metrics, 0)

    def _log_metrics(self, run: str | None, metrics: Mapping[str, float], step: int) -> None:
        check_names(metrics)
        values = {name: float(value) for name, value in metrics.items()}
        self._append("metrics", run=run, metrics=values, step=step)

    def log_params(self, params: Mapping[str, Any]) -> None:
        self._append("params", params={name: str(value) for name, value in params.items()})

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        self._keep(lambda: self._spool.append("artifact", path=self._spool.keep(path), folder=folder))

    def log_figure(self, figure: Any, name: str) -> None:
        folder, _, file_name = name.rpartition("/")

        def save() -> None:
            path = self._spool.new_file(file_name)
            figure.savefig(path)
            self._spool.append("artifact", path=self._spool.relative(path), folder=folder or None)

        self._keep(save)

    def log_text(self, text: str, name: str) -> None:
        """Save a text as the artifact `name`, such as `config.json`."""
        folder, _, file_name = name.rpartition("/")

        def save() -> None:
            path = self._spool.new_file(file_name)
            path.write_text(text)
            self._spool.append("artifact", path=self._spool.relative(path), folder=folder or None)

        self._keep(save)

    def log_rollouts(self, path: Path, name: str, context: str = "training") -> None:
        self._append("dataset", source=str(path.absolute()), name=name, context=context)

    def register_model_version(self, name: str, directory: Path, tags: Mapping[str, str], folder: str = "") -> None:
        def register() -> None:
            size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            without = WEIGHTS if size > self._max_model_gib * GIB else ""
            path = self._spool.keep(directory, folder, without)
            self._spool.append("model", path=path, name=name, tags={**tags, "specrl.location": str(directory)})

        self._keep(register)

    def flush(self) -> None:
        self._keep(self._spool.sync)

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; a tag of the same name is replaced."""
        self._append("tags", tags=dict(tags))

    def _append(self, kind: str, **values: Any) -> None:
        self._keep(lambda: self._spool.append(kind, **values))

    def _keep(self, write: Callable[[], None]) -> None:
        """Write to the spool; where the disk does not take it, count what is lost, and say so once."""
        try:
            write()
        except OSError as error:
            if not self._lost:
                logger.warning(
                    "%s: %s; what is logged is lost until there is room again, and nothing else is affected",
                    self._spool.folder,
                    error,
                )
            self._lost += 1
            return
        if self._lost:
            logger.warning("%s can be written again; %d entries were lost", self._spool.folder, self._lost)
            self._lost = 0


def check_names(metrics: Mapping[str, float]) -> None:
    """Assert that `specrl.metrics` defines every name."""
    unknown = [name for name in metrics if find_metric(name) is None]
    assert not unknown, f"metrics that specrl.metrics does not define: {unknown}"
