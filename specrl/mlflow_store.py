"""The MLflow store of a run: a sqlite file in the runs folder, or a server. What `specrl.tracking` is made of."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any
from urllib.request import urlopen

from specrl.config import Config
from specrl.metrics import find_metric

SERVER_SECONDS = 5.0
"""A tracking server must answer within so long before anything starts."""
BATCH_METRICS, BATCH_PARAMS, PARAM_LENGTH = 1000, 100, 6000
"""MLflow's limits on one request."""
ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}


def tracking_uri(config: Config) -> str:
    """Where runs are recorded: the configured server, or the sqlite file of the runs folder."""
    return config.tracking.uri or f"sqlite:///{config.runs_dir.absolute() / 'mlflow.db'}"


def connect(config: Config) -> Any:
    """A client of the run's store; makes and migrates a sqlite database.

    Raises:
        ValueError: the tracking server does not answer.
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
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False


def log_params(client: Any, run_id: str, params: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    known = client.get_run(run_id).data.params
    new = [Param(name, str(value)[:PARAM_LENGTH]) for name, value in params.items() if name not in known]
    for start in range(0, len(new), BATCH_PARAMS):
        client.log_batch(run_id, params=new[start : start + BATCH_PARAMS])


def entities(metrics: Mapping[str, float], step: int) -> list[Any]:
    from mlflow.entities import Metric

    check_names(metrics)
    now = int(time.time() * 1000)
    return [Metric(name, float(value), now, step) for name, value in metrics.items()]


def check_names(metrics: Mapping[str, float]) -> None:
    unknown = [name for name in metrics if find_metric(name) is None]
    assert not unknown, f"metrics that specrl.metrics does not define: {unknown}"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
