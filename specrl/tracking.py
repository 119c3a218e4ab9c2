"""MLflow: one parent run per pipeline run, a child per stage, which a resubmitted stage continues.

Without `tracking.uri` everything lies in `RUNS_DIR/mlflow.db` and `RUNS_DIR/mlartifacts`. The flow makes the database
and the parent run before any job starts; in a job, rank 0 logs and the other ranks hold a tracker that does nothing.
MLflow takes seconds to import, so it is imported when the first of these functions is called.
"""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.request import urlopen

from specrl.artifacts import write_text
from specrl.config import Config, dump_config
from specrl.context import StageContext
from specrl.keys import files_digest
from specrl.metrics import find_metric

if TYPE_CHECKING:
    from specrl.distributed import Ranks

logger = logging.getLogger(__name__)
Status = Literal["FINISHED", "FAILED", "KILLED"]

RUN_ID_FILE = "mlflow_run_id"
PARENT_TAG, NAME_TAG = "mlflow.parentRunId", "mlflow.runName"
FLUSH_SECONDS = 1.0
"""Metrics are written at once, unless the last write is younger than this; then they wait for the next one."""
SERVER_SECONDS = 5.0
"""The time within which a tracking server must answer before anything starts."""
BATCH_METRICS, BATCH_PARAMS, PARAM_LENGTH = 1000, 100, 6000
"""MLflow's limits on the metrics and parameters of one request and on the length of a parameter."""
ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
"""The environment's defaults for MLflow: no telemetry, no progress bar, and short waits for a server that is away."""


class Tracker(Protocol):
    """The MLflow run of a stage, a child of the pipeline's."""

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Log metrics, whose names `specrl.metrics` must define. They are written in batches; see `flush`."""

    def log_run_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log results of the whole pipeline run: to the parent run at once, and to the stage's own run."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters. MLflow never changes one: where a stage was submitted again, the first value stays."""

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file, or everything in a directory, below `folder` of the run's artifacts."""

    def log_figure(self, figure: Any, name: str) -> None:
        """Save a matplotlib figure as the artifact `name`, such as `calibration/errors.png`."""

    def log_rollouts(self, path: Path, name: str) -> None:
        """Record an Arrow file, or a folder of them, as a data set of the run: where it lies and its digest."""

    def register_model_version(self, name: str, directory: Path, tags: Mapping[str, str]) -> str | None:
        """Upload a directory and register it as a version of the model `name`, only once for each directory name.

        Returns:
            The version's number; None on ranks that do not log.
        """

    def flush(self) -> None:
        """Write the metrics that wait; call it when a step is complete, so that a kill loses none."""


class Silent:
    """The tracker of ranks that do not log."""

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        check_names(metrics)

    def log_run_metrics(self, metrics: Mapping[str, float]) -> None:
        check_names(metrics)

    def log_params(self, params: Mapping[str, Any]) -> None: ...

    def log_artifact(self, path: Path, folder: str | None = None) -> None: ...

    def log_figure(self, figure: Any, name: str) -> None: ...

    def log_rollouts(self, path: Path, name: str) -> None: ...

    def register_model_version(self, name: str, directory: Path, tags: Mapping[str, str]) -> str | None: ...

    def flush(self) -> None: ...


class _MlflowTracker:
    """The tracker of the first rank."""

    def __init__(self, client: Any, run_id: str, parent_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._parent_id = parent_id
        self._waiting: list[Any] = []
        self._flushed_at = 0.0

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        self._waiting += entities(metrics, step)
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def log_run_metrics(self, metrics: Mapping[str, float]) -> None:
        self._client.log_batch(self._parent_id, metrics=entities(metrics, 0))
        self.log_metrics(metrics)

    def log_params(self, params: Mapping[str, Any]) -> None:
        log_params(self._client, self._run_id, params)

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        log = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        log(self._run_id, str(path), folder)

    def log_figure(self, figure: Any, name: str) -> None:
        self._client.log_figure(self._run_id, figure, name)

    def log_rollouts(self, path: Path, name: str) -> None:
        from mlflow.data.dataset_source_registry import resolve_dataset_source
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.entities import DatasetInput

        files = sorted(path.rglob("*.arrow")) if path.is_dir() else [path]
        digest = files_digest((file, str(file.relative_to(path))) for file in files)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow has two equal classes for a local path, and says so
            source = resolve_dataset_source(str(path.absolute()))
        dataset = MetaDataset(source, name, digest)
        self._client.log_inputs(self._run_id, [DatasetInput(dataset._to_mlflow_entity(), [])])

    def register_model_version(self, name: str, directory: Path, tags: Mapping[str, str]) -> str | None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        self.log_artifact(directory, directory.name)
        source = f"{self._client.get_run(self._run_id).info.artifact_uri}/{directory.name}"
        for version in self._client.search_model_versions(f"run_id = '{self._run_id}'"):
            if (version.name, version.source) == (name, source):  # this stage was killed after it had registered
                return str(version.version)
        version = self._client.create_model_version(name, source, run_id=self._run_id, tags=dict(tags))
        return str(version.version)

    def flush(self) -> None:
        """Write the metrics that wait; where the store does not answer, keep them for the next time and warn.

        A store that is away for a moment must not end a training run.
        """
        from mlflow.exceptions import MlflowException

        try:
            self._write()
        except MlflowException as error:
            reason = str(error).partition("\n")[0]
            logger.warning(
                "MLflow does not take metrics at the moment (%s); %d wait for the next time", reason, len(self._waiting)
            )
        self._flushed_at = time.monotonic()

    def _write(self) -> None:
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=self._waiting[:BATCH_METRICS])
            del self._waiting[:BATCH_METRICS]

    def close(self, status: Status) -> None:
        self._write()
        self._client.set_terminated(self._run_id, status)


def start_parent_run(config: Config) -> str:
    """Create the run's MLflow run, or continue the one noted in its folder, and return its id.

    Database, experiment and artifact folder are made where they do not exist yet. Parameters are those of the first
    call.

    Raises:
        ValueError: The tracking server does not answer.
    """
    client = connect(config)
    path = config.run_dir / RUN_ID_FILE
    run_id = path.read_text().strip() if path.exists() else None
    if run_id is not None and exists(client, run_id):
        client.update_run(run_id, status="RUNNING")
    else:
        tags = {NAME_TAG: config.name}
        run_id = str(client.create_run(experiment_id(client, config), tags=tags).info.run_id)
        write_text(path, run_id + "\n")
    log_params(client, run_id, flatten(json.loads(dump_config(config))))
    client.log_text(run_id, dump_config(config), "config.json")
    return run_id


def finish_parent_run(config: Config, run_id: str, status: Status) -> None:
    """End the parent run, and mark as killed those children that could not say how they ended."""
    client = connect(config)
    experiment = client.get_run(run_id).info.experiment_id
    unfinished = f"tags.`{PARENT_TAG}` = '{run_id}' and attributes.status = 'RUNNING'"
    for child in client.search_runs([experiment], unfinished):
        client.set_terminated(child.info.run_id, "KILLED")
    client.set_terminated(run_id, status)


@contextmanager
def stage_run(context: StageContext, ranks: Ranks) -> Iterator[Tracker]:
    """Give the stage its child run: RUNNING inside the block, FINISHED after it, FAILED when it raised.

    A stage that was killed continues its child, whose id lies in the stage's folder.

    Raises:
        ValueError: The tracking server does not answer, or does not know the parent run.
    """
    if not ranks.is_first:
        yield Silent()
        return
    client = connect(context.config)
    tracker = _MlflowTracker(client, _child(client, context), context.mlflow_run_id)
    status: Status = "FAILED"
    try:
        yield tracker
        status = "FINISHED"
    finally:
        tracker.close(status)


def _child(client: Any, context: StageContext) -> str:
    path = context.stage_dir / RUN_ID_FILE
    if path.exists() and exists(client, run_id := path.read_text().strip()):
        client.update_run(run_id, status="RUNNING")
        return run_id
    if not exists(client, context.mlflow_run_id):
        raise ValueError(
            f"MLflow run {context.mlflow_run_id} of {context.config.name} is not in {tracking_uri(context.config)}: "
            f"remove {context.run_dir / RUN_ID_FILE} to begin a new one"
        )
    experiment = client.get_run(context.mlflow_run_id).info.experiment_id
    tags = {PARENT_TAG: context.mlflow_run_id, NAME_TAG: context.stage, "specrl.key": context.key}
    run_id = str(client.create_run(experiment, tags=tags).info.run_id)
    write_text(path, run_id + "\n")
    return run_id


def tracking_uri(config: Config) -> str:
    """Return where runs are recorded: on the configured server, or in the sqlite file of the runs folder."""
    return config.tracking.uri or f"sqlite:///{config.runs_dir.absolute() / 'mlflow.db'}"


def connect(config: Config) -> Any:
    """Connect to the run's store, and create or migrate its sqlite database.

    Raises:
        ValueError: The tracking server does not answer.
    """
    uri = tracking_uri(config)
    if uri.startswith(("http://", "https://")):
        _ping(uri)
    config.runs_dir.absolute().mkdir(parents=True, exist_ok=True)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(uri, uri)


def _ping(uri: str) -> None:
    try:
        with urlopen(f"{uri.rstrip('/')}/health", timeout=SERVER_SECONDS):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(
            f"tracking.uri = {uri}: no MLflow server answers ({reason}); start it, or unset tracking.uri to record in "
            "a sqlite file in the runs folder"
        ) from error


def experiment_id(client: Any, config: Config) -> str:
    """Return the id of the experiment `tracking.experiment`, which is created where it does not exist."""
    from mlflow.exceptions import MlflowException

    name = config.tracking.experiment
    # A server knows where its artifacts belong; a sqlite file would put them below the current folder.
    folder = None if config.tracking.uri else (config.runs_dir.absolute() / "mlartifacts").as_uri()
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=folder))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # another run has just made it
    return str(found.experiment_id)


def exists(client: Any, run_id: str) -> bool:
    """Return whether the store has this run and nobody has deleted it."""
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False


def log_params(client: Any, run_id: str, params: Mapping[str, Any]) -> None:
    """Log those parameters that the run does not have yet: MLflow never changes one."""
    from mlflow.entities import Param

    known = client.get_run(run_id).data.params
    new = [Param(name, str(value)[:PARAM_LENGTH]) for name, value in params.items() if name not in known]
    for start in range(0, len(new), BATCH_PARAMS):
        client.log_batch(run_id, params=new[start : start + BATCH_PARAMS])


def entities(metrics: Mapping[str, float], step: int) -> list[Any]:
    """Return metrics as MLflow's entities, with the present time."""
    from mlflow.entities import Metric

    check_names(metrics)
    now = int(time.time() * 1000)
    return [Metric(name, float(value), now, step) for name, value in metrics.items()]


def check_names(metrics: Mapping[str, float]) -> None:
    """Assert that `specrl.metrics` defines every name."""
    unknown = [name for name in metrics if find_metric(name) is None]
    assert not unknown, f"metrics that specrl.metrics does not define: {unknown}"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted names, such as `train.num_steps`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
