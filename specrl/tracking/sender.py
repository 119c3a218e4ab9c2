"""Send the entries of a spool to MLflow, in order and once.

What may have arrived before a connection broke can be sent again: a run is looked for before it is created, a model
version before it is registered; a metric has the time at which it was logged, and MLflow keeps one point for each name,
step, time and value; everything else replaces itself.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specrl.artifacts import read_json, read_lines, write_json, write_text
from specrl.config import Config
from specrl.data.places import files_of
from specrl.keys import files_digest
from specrl.tracking.spool import LATER, QUEUE, Entry, Spool
from specrl.tracking.store import RUN_ID_FILE, exists, experiment_id

logger = logging.getLogger(__name__)

VERSIONS_FILE = "versions.json"
"""The file beside a spool that holds the numbers of the model versions it has registered, by the models' names."""
REFUSED_FILE = "refused.jsonl"
PARENT_TAG, NAME_TAG = "mlflow.parentRunId", "mlflow.runName"
SCORE_TAG = "specrl.score"
"""The tag of a model version by which the alias `best` is given."""
BATCH_METRICS, BATCH_PARAMS, PARAM_LENGTH, TAG_LENGTH = 1000, 100, 6000, 8000
"""MLflow's limits on the metrics and parameters of one request, and on the length of a parameter and of a tag."""
STORED = ("artifact", "model")
"""The kinds of entries that need the artifact store besides MLflow itself."""
REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST"}
"""MLflow's answers to what it will never take. After any other error the same entry is sent again."""


class Sender:
    """Sends the entries of one spool to the MLflow run of the spool's owner, a run or a stage."""

    def __init__(self, client: Any, config: Config, spool: Spool) -> None:
        self._client, self._config, self._spool = client, config, spool
        self._id_path = spool.owner / RUN_ID_FILE
        self._has_refused = False
        self._is_later = spool.path == Spool(spool.owner, LATER).path
        self._later = Spool(spool.owner, LATER)

    def send_next(self) -> bool:
        """Send the next entry, or the next metrics together; return whether there was any.

        Raises:
            Exception: MLflow or its artifact store is away; whatever their clients raise. Nothing was acknowledged.
        """
        entries = self._next()
        if not entries:
            return False
        self._spool.sync()
        if self._is_for_later(entries[0]):
            return True
        if self._send(entries) is not None:  # one of them is refused; the others are not to be lost with it
            for entry in entries:
                if (reason := self._send([entry])) is not None:
                    self._put_aside(entry, reason)
        self._spool.acknowledge(entries)
        return True

    def _is_for_later(self, entry: Entry) -> bool:
        """Move what the artifact store does not take to a queue of its own, so that it holds back nothing else.

        What comes after it goes there untried: of two artifacts of a name, the later one is to stay.
        """
        if self._is_later or entry.kind not in STORED:
            return False
        if not self._later.has_waiting():
            try:
                refused = self._send([entry])
            except Exception as error:  # artifact stores raise errors of many libraries
                self._client.get_run(self._run_id(entry))  # raises where it is MLflow itself that is away
                logger.warning(
                    "an artifact of %s cannot be stored (%s): artifacts wait on disk, and everything else is sent",
                    self._spool.owner.name,
                    str(error).partition("\n")[0],
                )
            else:
                if refused is not None:
                    self._put_aside(entry, refused)
                self._spool.acknowledge([entry])
                return True
        self._later.append(entry.kind, **entry.values)
        self._spool.acknowledge([entry], keep=True)
        return True

    def _send(self, entries: list[Entry]) -> str | None:
        """Send one entry, or several metrics of one run; return why MLflow will never take them, or None if it did."""
        from mlflow.exceptions import MlflowException

        try:
            if entries[0].kind == "metrics":
                self._send_metrics(entries)
            else:
                SENDERS[entries[0].kind](self, entries[0])
        except MlflowException as error:
            if error.error_code not in REFUSALS:
                raise
            return str(error).partition("\n")[0]
        except FileNotFoundError as error:  # what was to be sent has been removed
            return str(error)
        return None

    def _put_aside(self, entry: Entry, reason: str) -> None:
        """Write an entry that MLflow will never take to a file, so that those behind it get through; say so once."""
        path = self._spool.folder / REFUSED_FILE
        if not self._has_refused:
            logger.warning("MLflow refuses an entry (%s); it and any others are in %s", reason, path)
        self._has_refused = True
        with path.open("a") as file:
            refused = {"kind": entry.kind, "time_ms": entry.time_ms, **entry.values, "reason": reason}
            file.write(json.dumps(refused) + "\n")

    def _next(self) -> list[Entry]:
        """Return the next entry; of metrics, all that follow one another for the same run, as far as a request goes."""
        group: list[Entry] = []
        total = 0
        for entry in self._spool.waiting():
            if group and not (
                entry.kind == group[0].kind == "metrics" and entry.values["run"] == group[0].values["run"]
            ):
                break
            total += len(entry.values["metrics"]) if entry.kind == "metrics" else 0
            if group and total > BATCH_METRICS:
                break
            group.append(entry)
            if entry.kind != "metrics":
                break
        return group

    def _run_id(self, entry: Entry) -> str:
        """Return the run that an entry belongs to: the parent, which it names, or the owner's own."""
        return self._parent(entry.values.get("run")) or self._id_path.read_text().strip()

    def _parent(self, named: str | None) -> str | None:
        """Return the parent that an entry names, or the one that was made in place of it when somebody deleted it."""
        path = self._config.run_dir / RUN_ID_FILE
        return path.read_text().strip() if named and path.exists() else named

    def _send_metrics(self, entries: list[Entry]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), entry.time_ms, entry.values["step"])
            for entry in entries
            for name, value in entry.values["metrics"].items()
        ]
        for start in range(0, len(metrics), BATCH_METRICS):
            self._client.log_batch(self._run_id(entries[0]), metrics=metrics[start : start + BATCH_METRICS])

    def start(self, entry: Entry) -> None:
        """Create the owner's run, or continue it."""
        parent, tags = self._parent(entry.values["parent"]), dict(entry.values["tags"])
        tags |= {NAME_TAG: entry.values["name"], **({PARENT_TAG: parent} if parent else {})}
        run_id = self._find(entry)
        if run_id is None:
            experiment = self._experiment(parent)
            run_id = str(self._client.create_run(experiment, start_time=entry.time_ms, tags=tags).info.run_id)
        self._client.update_run(run_id, status="RUNNING")
        self._set_tags(run_id, tags)
        write_text(self._id_path, run_id + "\n")

    def _find(self, entry: Entry) -> str | None:
        """Return the owner's run if there is one: the noted one, or one whose creation could not be noted any more."""
        noted = self._id_path.read_text().strip() if self._id_path.exists() else None
        if noted is not None:
            return noted if exists(self._client, noted) else None
        asked = f"attributes.start_time = {entry.time_ms} and attributes.run_name = '{entry.values['name']}'"
        found = self._client.search_runs([self._experiment(self._parent(entry.values["parent"]))], asked, max_results=1)
        return str(found[0].info.run_id) if found else None

    def _experiment(self, parent: str | None) -> str:
        if parent and exists(self._client, parent):
            return str(self._client.get_run(parent).info.experiment_id)
        return experiment_id(self._client, self._config)

    def end(self, entry: Entry) -> None:
        """End the owner's run."""
        self._client.set_terminated(self._run_id(entry), entry.values["status"], entry.time_ms)

    def params(self, entry: Entry) -> None:
        """Log those parameters that the run does not have yet: MLflow never changes one."""
        from mlflow.entities import Param

        run_id = self._run_id(entry)
        known = self._client.get_run(run_id).data.params
        params = entry.values["params"]
        new = [Param(name, value[:PARAM_LENGTH]) for name, value in params.items() if name not in known]
        for first in range(0, len(new), BATCH_PARAMS):
            self._client.log_batch(run_id, params=new[first : first + BATCH_PARAMS])

    def tags(self, entry: Entry) -> None:
        """Set tags of the run."""
        self._set_tags(self._run_id(entry), entry.values["tags"])

    def _set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        new = [RunTag(name, value[:TAG_LENGTH]) for name, value in tags.items()]
        if new:
            self._client.log_batch(run_id, tags=new)

    def artifact(self, entry: Entry) -> None:
        """Upload a file, or everything in a folder."""
        self._upload(self._run_id(entry), entry.values["path"], entry.values["folder"])

    def _upload(self, run_id: str, path: str, folder: str | None) -> None:
        kept = self._spool.kept(path)
        log = self._client.log_artifacts if kept.is_dir() else self._client.log_artifact
        log(run_id, str(kept), folder)

    def dataset(self, entry: Entry) -> None:
        """Record a file, or a folder of Arrow files, as a data set of the run: where it lies and its digest."""
        from mlflow.data.dataset_source_registry import resolve_dataset_source
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.entities import DatasetInput, InputTag

        path = Path(entry.values["source"])
        data = files_of((self._config.data.path or ()) + (self._config.data.validation_path or ()))
        if path not in data and not path.resolve().is_relative_to(self._config.run_dir.resolve()):
            raise FileNotFoundError(f"{path} is neither the run's nor named in its configuration")
        files = (
            [(file, str(file.relative_to(path))) for file in path.rglob("*.arrow")] if path.is_dir() else [(path, "")]
        )
        digest = files_digest(files)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow has two equal classes for a local path, and says so
            source = resolve_dataset_source(str(path))
        dataset = MetaDataset(source, entry.values["name"], digest)
        tags = [InputTag("mlflow.data.context", entry.values["context"])]
        self._client.log_inputs(self._run_id(entry), [DatasetInput(dataset._to_mlflow_entity(), tags)])

    def model(self, entry: Entry) -> None:
        """Upload a folder and register it as a version of a model, once for each run and name of the folder."""
        name, path, run_id = entry.values["name"], entry.values["path"], self._run_id(entry)
        self._upload(run_id, path, Path(path).name)
        self._create_model(name)
        source = f"{self._client.get_run(run_id).info.artifact_uri}/{Path(path).name}"
        found = self._client.search_model_versions(f"run_id = '{run_id}'")
        numbers = [str(version.version) for version in found if (version.name, version.source) == (name, source)]
        if not numbers:
            tags = dict(entry.values["tags"])
            created = self._client.create_model_version(name, source, run_id, tags=tags, await_creation_for=0)
            numbers = [str(created.version)]
        self._set_best(name, numbers[0], entry.values["tags"])
        versions = self._spool.folder / VERSIONS_FILE
        known = json.loads(versions.read_text()) if versions.exists() else {}
        write_json(versions, {**known, name: numbers[0]})

    def _create_model(self, name: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _set_best(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        """Let the alias `best` be this version, unless the present best one has a higher score.

        The alias `latest` is MLflow's own, and always the newest version.
        """
        best = self._client.get_registered_model(name).aliases.get("best")
        if best is not None:
            known = self._client.get_model_version(name, best).tags.get(SCORE_TAG, "-inf")
            if float(known) > float(tags.get(SCORE_TAG, "-inf")):
                return
        self._client.set_registered_model_alias(name, "best", version)


SENDERS: Mapping[str, Callable[[Sender, Entry], None]] = {
    "start": Sender.start,
    "end": Sender.end,
    "params": Sender.params,
    "tags": Sender.tags,
    "artifact": Sender.artifact,
    "dataset": Sender.dataset,
    "model": Sender.model,
}
"""What sends an entry of each kind but metrics, which are sent together."""


def needs_repair(client: Any, folder: Path) -> bool:
    """Return whether the MLflow run of a folder is gone, or has refused something that it may take by now.

    Raises:
        MlflowException: MLflow is away.
    """
    path, refused = folder / RUN_ID_FILE, Spool(folder).folder / REFUSED_FILE
    kinds = {line.get("kind") for line in read_lines(refused)} - set(STORED) if refused.exists() else set()
    return bool(kinds) or (path.exists() and not exists(client, path.read_text().strip()))


def repair(folder: Path) -> None:
    """Have everything that a folder has logged sent again, to its MLflow run or to one that is made for it."""
    for queue in (QUEUE, LATER):
        Spool(folder, queue).rewind()
    (Spool(folder).folder / REFUSED_FILE).unlink(missing_ok=True)


def registered_version(folder: Path, name: str) -> str | None:
    """Return the version of the model `name` that a stage has registered, or None where it has none (yet).

    Args:
        folder: The stage's folder.
    """
    found = read_json(Spool(folder).folder / VERSIONS_FILE)
    return found.get(name) if isinstance(found, dict) else None
