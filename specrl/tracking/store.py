"""The MLflow store of a run: its location, the connection to it, and the experiment in it."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import sqlite3
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from specrl.artifacts import atomic_path
from specrl.config import Config, ConfigError
from specrl.config.cluster import checked_uri
from specrl.processes import reach_loopback

RUN_ID_FILE = "mlflow_run_id"  # the MLflow run's id, in a run's or a stage's folder
VIEW_NAME = "specrl"  # a saved view of the run table
VIEW_QUERY = f"?workflowType=machine_learning&viewStateShareKey={VIEW_NAME}"
"""Opens the run table in that view; by default, MLflow 3.17 shows its GenAI pages."""
SERVER_SECONDS = 10.0  # for a server to answer before anything starts
REFUSAL_CHARACTERS = 160  # of a server's refusal that are quoted
CREATE_SECONDS = 300  # for another process to create the database
ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}
"""No telemetry, no progress bar; `sync` retries."""
URI_VARIABLE = "MLFLOW_TRACKING_URI"
PARTS = ("mlflow", "mlflow.data.meta_dataset", "mlflow.store.tracking.sqlalchemy_store")
"""The last two are imported lazily by MLflow's client."""
HEADLINES = (
    "validate/accuracy_before",
    "validate/accuracy_after",
    "reward/mean",
    "speedup/generation",
    "speedup/step",
    "speedup/end_to_end",
    "spec/acceptance_length",
)
"""The metrics by which runs are judged, in the column order of the saved view."""
BENCHMARKS = "-bench"  # suffix of the experiment of benchmarks' cells
OF_THE_RUN = re.compile(
    r"(validate|speedup|export)/.+|reward/mean|spec/acceptance_length|validation/[^/]+/(accuracy|avg_at_k|pass_at_k)"
)
"""Metrics of stages that are also logged to the pipeline's run: results, and those for watching a training."""


class DeletedError(ConfigError):
    """A run or experiment was deleted in MLflow, which accepts nothing for it until it is restored."""


def run_id_of(folder: Path) -> str | None:
    """The MLflow run's id of a run's or a stage's folder; None if nothing has been sent yet."""
    path = folder / RUN_ID_FILE
    return path.read_text().strip() if path.exists() else None


def tracking_uri(config: Config) -> str:
    """The URI of the store: the configured server, or the sqlite file in the runs folder.

    For a run that has not begun, MLFLOW_TRACKING_URI is the default of the setting.
    """
    has_begun = (config.run_dir / RUN_ID_FILE).exists()
    return config.tracking.uri or (None if has_begun else uri_of_environment()) or own_uri(config)


def uri_of_environment() -> str | None:
    """The value of MLFLOW_TRACKING_URI, if any, in the form of `tracking.uri`."""
    given = os.environ.get(URI_VARIABLE)
    try:
        return checked_uri(given) if given else None
    except ValueError as error:
        raise ConfigError(f"{URI_VARIABLE}: {error}") from error


def own_uri(config: Config) -> str:
    return f"sqlite:///{config.runs_dir.absolute() / 'mlflow.db'}"


def connect(config: Config) -> Any:
    """Make a client of the run's store; creates or migrates a sqlite database, but contacts no server."""
    config.runs_dir.absolute().mkdir(parents=True, exist_ok=True)
    import_mlflow()
    from mlflow import MlflowClient

    uri = tracking_uri(config)
    if uri.startswith("sqlite"):
        _create_database(uri)
    return MlflowClient(uri, uri)


def _create_database(uri: str) -> None:
    """Create a missing SQLite file atomically: MLflow creates its tables in many steps, and cannot continue a file in
    which it was interrupted or in which two runs alternated."""
    from mlflow.store.db.utils import _initialize_tables
    from sqlalchemy import create_engine, make_url

    path = Path(make_url(uri).database or "").resolve()
    if path.exists() or not path.parent.is_dir():
        return
    with FileLock(path.with_name(f"{path.name}.lock"), timeout=CREATE_SECONDS):
        if path.exists():
            return
        with atomic_path(path) as temporary:
            engine = create_engine(f"sqlite:///{temporary}")
            _initialize_tables(engine)
            engine.dispose()


def import_mlflow() -> None:
    """Import MLflow with this project's defaults, which takes seconds; not in two threads at once."""
    reach_loopback()
    if "SSL_CERT_FILE" in os.environ:  # OpenSSL's variable, which requests ignores
        os.environ.setdefault("REQUESTS_CA_BUNDLE", os.environ["SSL_CERT_FILE"])
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for module in PARTS:
        importlib.import_module(module)
    # The sender reports an unreachable store in one line; no traceback at every attempt.
    vars(sys.modules["mlflow.store.db.utils"])["MAX_RETRY_COUNT"] = 1
    for name in ("mlflow.store.db.utils", "mlflow.utils.databricks_utils", "databricks.sdk"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def check_server(config: Config) -> None:
    """Raise a `ConfigError` unless the configured tracking server answers, or its database can be opened here."""
    uri, key = tracking_uri(config), "tracking.uri"
    with contextlib.suppress(ConfigError):  # the setting replaces the variable
        key = URI_VARIABLE if uri_of_environment() == uri else key
    if not uri.startswith(("http://", "https://")):
        own = Path(own_uri(config).removeprefix("sqlite:///"))
        if uri.startswith("databricks") and not (name := config.tracking.experiment).startswith("/"):
            raise ConfigError(f"tracking.experiment = {name}: Databricks takes paths, such as /Users/NAME/{name}")
        if (uri != own_uri(config) or os.path.lexists(own)) and (lack := lack_of_store(uri)) is not None:
            raise ConfigError(f"{key} = {uri}: {lack}")
        return
    answer = _ask(uri, "/api/2.0/mlflow/experiments/search?max_results=1")  # allowed for every user
    if isinstance(answer, str):
        reason = answer
    elif answer.status_code in (401, 403):
        said = " ".join(re.sub(r"<[^>]*>", " ", f"{answer.status_code} {answer.text[:REFUSAL_CHARACTERS]}").split())
        raise ConfigError(
            f"{key} = {uri}: MLflow refuses what it is asked ({said}); credentials are given in the environment: "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )
    elif answer.status_code not in (200, 404):
        reason = f"it answers with {answer.status_code}"
    elif answer.text.strip() in ("", "OK", "{}") or re.search('"(experiments|error_code)"', answer.text):
        return
    else:
        reason = "what answers there is no MLflow"  # the page of another server, or of a proxy
    raise ConfigError(
        f"{key} = {uri}: no MLflow server answers ({reason}); start it, or unset {key} to record in a sqlite file in "
        "the runs folder"
    )


def lack_of_store(uri: str) -> str | None:
    """Why a store other than an MLflow server cannot be used from here, as far as seconds suffice to tell."""
    from sqlalchemy import create_engine
    from sqlalchemy.exc import ArgumentError

    scheme, _, file = uri.partition(":///")
    if scheme.startswith("sqlite"):
        return _lack_of_file(Path(file).resolve())
    if uri.startswith("databricks"):
        return _lack_of_databricks(uri.partition("://")[2] or None)
    if uri.startswith(("file:", "/")):
        import_mlflow()
        from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE

        takes_folders = MLFLOW_ALLOW_FILE_STORE.get()
        return None if takes_folders else "MLflow no longer records in a folder; give a file of SQLite, sqlite:///FILE"
    try:
        if scheme.startswith(("postgresql", "mysql", "mssql")):
            create_engine(uri)  # imports the driver without connecting
    except ModuleNotFoundError as error:
        return f"the database's driver is not installed here ({error}): pip install {error.name}"
    except ArgumentError as error:
        return " ".join(str(error).split())
    return None


def _lack_of_databricks(profile: str | None) -> str | None:
    import_mlflow()
    from databricks.sdk.config import Config as Settings
    from databricks.sdk.credentials_provider import credentials_strategy

    # MLflow itself would wait minutes for a silent host, and some credentials come from the host.
    nobody = credentials_strategy("none", [])(lambda settings: dict)
    ask = partial(Settings, profile=profile, http_timeout_seconds=int(SERVER_SECONDS), retry_timeout_seconds=1)
    try:
        host = ask(credentials_strategy=nobody, auth_type="none").host
        if host and isinstance(silent := _ask(host, "/health"), str):
            return f"{host} does not answer ({silent}); check DATABRICKS_HOST or ~/.databrickscfg"
        ask()
    except ValueError as error:
        said = " ".join(re.split(r", please|\. Config: ", str(error))[0].split())
        if "cannot configure default credentials" in said:
            return f"no credentials ({said}); set DATABRICKS_HOST and DATABRICKS_TOKEN, or use ~/.databrickscfg"
        return f"cannot be used ({said}); correct the variables DATABRICKS_... or ~/.databrickscfg"
    return None


def _lack_of_file(path: Path) -> str | None:
    if not path.exists():
        return None if path.parent.is_dir() else f"there is no folder {path.parent}; create it"
    if places := [place for place in (path.parent, path) if not os.access(place, os.W_OK)]:
        return f"{places[0]} cannot be written; name another file"
    try:  # without creating one; a killed process's partial writes are rolled back
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)) as database:
            database.execute("PRAGMA schema_version")  # reads the file
    except sqlite3.Error as error:
        return None if "locked" in str(error) else f"SQLite cannot use it ({error}); name another file"
    return None


def _ask(uri: str, path: str) -> Any:
    """A server's answer to MLflow's client, or why there is none, in words."""
    import_mlflow()
    from mlflow.exceptions import MlflowException
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    try:
        return http_request(get_default_host_creds(uri.rstrip("/")), path, "GET", timeout=SERVER_SECONDS, max_retries=0)
    except (MlflowException, OSError, ValueError) as error:
        return " ".join(str(error.__cause__ or error).split())


def experiment_id(client: Any, config: Config) -> str:
    """The id of the experiment `tracking.experiment`, which is created if necessary."""
    name = config.tracking.experiment
    if (found := client.get_experiment_by_name(name)) is None:
        # A server decides where artifacts go; a sqlite store would put them below the current folder.
        scheme, _, file = tracking_uri(config).partition(":///")
        folder = (Path(file).parent / "mlartifacts").as_uri() if scheme.startswith("sqlite") else None
        client.create_experiment(name, artifact_location=folder)  # fails if another run creates it now: retry
        found = client.get_experiment_by_name(name)
    if found.lifecycle_stage != "active":
        raise DeletedError(
            f"tracking.experiment = {name}: somebody has deleted it in MLflow; restore it (mlflow experiments restore "
            f"--experiment-id {found.experiment_id}), or name another one"
        )
    view = {f"mlflow.sharedViewState.{VIEW_NAME}": json.dumps(saved_view())}
    for tag, value in {"mlflow.experimentKind": "custom_model_development", **view}.items():
        if tag not in found.tags:
            client.set_experiment_tag(found.experiment_id, tag, value)
    return str(found.experiment_id)


def saved_view() -> dict[str, Any]:
    """A saved view of the run table, in the format of MLflow's pages, whose first columns are the headlines.

    Without it, the table shows no metrics, and chosen ones in alphabetical order.
    """
    columns = [f"metrics.`{name}`" for name in HEADLINES]
    shown = {
        "selectedColumns": [*columns, "attributes.`Source`", "attributes.`Version`", "attributes.`Models`"],
        "columnOrder": ["attributes.`Run Name`", *columns],
        "columnWidths": {name: 190 if name.startswith("metrics.") else 120 for name in columns},
    }
    return {"name": VIEW_NAME, "createdAt": int(time.time() * 1000), "state": json.dumps(shown)}


def table_address(config: Config) -> str:
    """The fragment of MLflow's address of the runs in that view; empty if nothing is recorded yet."""
    found = connect(config).get_experiment_by_name(config.tracking.experiment)
    return "" if found is None else f"#/experiments/{found.experiment_id}/runs{VIEW_QUERY}"


def exists(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
