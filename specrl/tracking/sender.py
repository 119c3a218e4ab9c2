"""Send the entries of a log to MLflow.

Whatever may have arrived before a connection broke is sent again. This is idempotent: runs and model versions are
looked up first, MLflow keeps one point per name, step, time and value, and everything else overwrites itself.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from specrl.artifacts import read_object, write_text
from specrl.config import Config
from specrl.data.formats.places import files_of
from specrl.keys import files_digest
from specrl.lineage.record import run_id as id_of
from specrl.tracking.log import Entry, Log, Sent
from specrl.tracking.store import OF_THE_RUN, RUN_ID_FILE, exists, experiment_id, run_id_of

PARENT_TAG, NAME_TAG = "mlflow.parentRunId", "mlflow.runName"
ID_TAG = "specrl.id"  # the run's random digits, which a copy of its folder does not share
SCORE_TAG = "specrl.score"  # determines which model version has the alias `best`
BATCH_METRICS, BATCH_PARAMS, PARAM_LENGTH, TAG_LENGTH = 1000, 100, 6000, 8000  # MLflow's limits
TOKENIZER = "components/tokenizer"  # below a model, where MLflow looks for the tokenizer's files
REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST"}  # such as for a deleted run


class RefusedError(Exception):
    """MLflow refused an entry; the message is its answer, in one line."""


class MlflowSender:
    """Sends a log's entries to the MLflow run of the log's owner, a run or a stage."""

    def __init__(self, client: Any, config: Config, sent: Sent) -> None:
        self._client, self._config, self._sent, self._log = client, config, sent, sent.log
        self._id_tag = {ID_TAG: own} if (own := id_of(config.run_dir)) else {}

    def send(self, entries: Sequence[Entry]) -> None:
        """Send one entry, or several metrics of one run.

        Raises RefusedError if MLflow refuses them, FileNotFoundError if a file was removed before it was sent, and
        whatever the clients raise if MLflow or its artifact store is unreachable.
        """
        from mlflow.exceptions import MlflowException

        try:
            if entries[0].kind == "metrics":
                self._send_metrics(entries)
            else:
                SENDERS[entries[0].kind](self, entries[0])
        except MlflowException as error:
            if error.error_code not in REFUSALS:
                raise
            raise RefusedError(str(error).partition("\n")[0]) from error

    @property
    def _run_id(self) -> str:
        if (noted := run_id_of(self._log.owner)) is None:
            raise RefusedError("the start of its run was not logged")
        return noted

    @property
    def _parent(self) -> str | None:
        """The pipeline's MLflow run: the one that the start of the log's run names, or its replacement."""
        named: str | None = self._log.first_start().get("parent")
        return named and (run_id_of(self._config.run_dir) or named)

    def _send_metrics(self, entries: Sequence[Entry]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), entry.time_ms, entry.values["step"])
            for entry in entries
            for name, value in entry.values["metrics"].items()
        ]
        results = [metric for metric in metrics if OF_THE_RUN.fullmatch(metric.key)] if self._parent else []
        for run_id, values in ((self._run_id, metrics), (self._parent, results)):
            for start in range(0, len(values), BATCH_METRICS):
                self._client.log_batch(run_id, metrics=values[start : start + BATCH_METRICS])

    def start(self, entry: Entry) -> None:
        parent, tags = self._parent, dict(entry.values["tags"])
        tags |= self._id_tag | {NAME_TAG: entry.values["name"], **({PARENT_TAG: parent} if parent else {})}
        if (run_id := self._find(entry)) is None:
            experiment = self._experiment(parent)
            run_id = str(self._client.create_run(experiment, start_time=entry.time_ms, tags=tags).info.run_id)
        self._client.update_run(run_id, status="RUNNING")
        self._set_tags(run_id, tags)
        write_text(self._log.owner / RUN_ID_FILE, run_id + "\n")

    def _find(self, entry: Entry) -> str | None:
        if (noted := run_id_of(self._log.owner)) is not None:
            return noted if exists(self._client, noted) else None
        asked = f"attributes.start_time = {entry.time_ms}"
        asked += "".join(f" and tags.`{name}` = '{own}'" for name, own in self._id_tag.items())
        found = self._client.search_runs([self._experiment(self._parent)], asked)
        same = (run.info for run in found if run.info.run_name == entry.values["name"])  # it may contain any quotes
        return next((str(info.run_id) for info in same), None)

    def _experiment(self, parent: str | None) -> str:
        if parent and exists(self._client, parent):
            return str(self._client.get_run(parent).info.experiment_id)
        return experiment_id(self._client, self._config)

    def end(self, entry: Entry) -> None:
        self._client.set_terminated(self._run_id, entry.values["status"], entry.time_ms)

    def params(self, entry: Entry) -> None:
        """Log the parameters that the run lacks, because MLflow never changes one."""
        from mlflow.entities import Param

        run_id = self._run_id
        known = self._client.get_run(run_id).data.params
        params = entry.values["params"]
        new = [Param(name, value[:PARAM_LENGTH]) for name, value in params.items() if name not in known]
        for first in range(0, len(new), BATCH_PARAMS):
            self._client.log_batch(run_id, params=new[first : first + BATCH_PARAMS])

    def tags(self, entry: Entry) -> None:
        self._set_tags(self._run_id, entry.values["tags"])

    def _set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        if new := [RunTag(name, value[:TAG_LENGTH]) for name, value in tags.items()]:
            self._client.log_batch(run_id, tags=new)

    def artifact(self, entry: Entry) -> None:
        self._upload(entry, entry.values["folder"])

    def _upload(self, entry: Entry, folder: str | None, without: str = "") -> None:
        path, run_id = self._find_file(entry.values["path"]), self._run_id
        if path.is_file():
            self._client.log_artifact(run_id, str(path), folder)
            return
        for file in sorted(path.rglob("*")):
            if file.is_file() and not file.match(without or "/"):
                below = PurePosixPath(folder or "") / file.parent.relative_to(path)
                self._client.log_artifact(run_id, str(file), str(below))

    def _find_file(self, name: str) -> Path:
        """Find a file, which must lie in the pipeline run's folder and must not lead out of it."""
        path, root = Path(os.path.normpath(self._log.owner.resolve() / name)), self._config.run_dir.resolve()
        if path == root or not path.is_relative_to(root):
            raise FileNotFoundError(f"{path} is not in the folder of the run")
        inside = path.rglob("*") if path.is_dir() else ()
        if any(place.is_symlink() for place in (path, *path.parents[: len(path.relative_to(root).parts)], *inside)):
            raise FileNotFoundError(f"{path} leads elsewhere: links are not followed")
        if not path.exists():
            raise FileNotFoundError(f"{path} has been removed")
        return path

    def dataset(self, entry: Entry) -> None:
        from mlflow.data.dataset_source_registry import resolve_dataset_source
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.entities import DatasetInput, InputTag

        path = Path(os.path.normpath(self._log.owner.resolve() / entry.values["source"]))
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
        self._client.log_inputs(self._run_id, [DatasetInput(dataset._to_mlflow_entity(), tags)])

    def model(self, entry: Entry) -> None:
        """Upload and register a model, and record its version number."""
        name, folder, run_id = entry.values["name"], entry.values["folder"], self._run_id
        without, path = entry.values["without"], self._find_file(entry.values["path"])
        self._upload(entry, folder, without)
        if is_policy(path):
            for file in sorted(path.iterdir()):
                if file.is_file() and ".safetensors" not in file.name:  # neither the weights nor their index
                    self._client.log_artifact(run_id, str(file), f"{folder}/{TOKENIZER}")
            self._client.log_text(run_id, mlmodel(path, path if without else None), f"{folder}/MLmodel")
        if not self._client.search_registered_models(f"name = '{name}'"):
            self._client.create_registered_model(name)
        source = f"{self._client.get_run(run_id).info.artifact_uri}/{folder}"
        found = self._client.search_model_versions(f"run_id = '{run_id}'")
        numbers = [str(version.version) for version in found if (version.name, version.source) == (name, source)]
        if not numbers:
            tags = dict(entry.values["tags"])
            created = self._client.create_model_version(name, source, run_id, tags=tags, await_creation_for=0)
            numbers = [str(created.version)]
        self._set_best(name, numbers[0], entry.values["tags"])
        self._sent.now.versions[name] = numbers[0]

    def _set_best(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        """Set the alias `best`; MLflow itself maintains `latest`, the newest version."""
        if (best := self._client.get_registered_model(name).aliases.get("best")) is not None:
            known = self._client.get_model_version(name, best).tags.get(SCORE_TAG, "-inf")
            if float(known) > float(tags.get(SCORE_TAG, "-inf")):
                return
        self._client.set_registered_model_alias(name, "best", version)


def is_policy(folder: Path) -> bool:
    """Whether transformers alone can generate with a folder; not with EAGLE-3, which reads a policy's hidden states."""
    named = read_object(folder / "config.json").get("architectures")
    is_causal = isinstance(named, list) and bool(named) and str(named[0]).endswith("ForCausalLM")
    return is_causal and (folder / "tokenizer.json").is_file()


def mlmodel(folder: Path, weights_at: Path | None) -> str:
    """The text of a policy's `MLmodel` file; `weights_at` is the policy's folder if its weights are not uploaded."""
    from mlflow.models import Model

    place = {"model_binary": "."} if weights_at is None else {"local_base_model_path": str(weights_at)}
    model = Model()
    model.add_flavor(
        "transformers",
        task="text-generation",
        instance_type="TextGenerationPipeline",
        pipeline_model_type=read_object(folder / "config.json")["architectures"][0],
        source_model_name=str(weights_at or folder),
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
        **place,
    )
    return str(model.to_yaml())


SENDERS: Mapping[str, Callable[[MlflowSender, Entry], None]] = {
    "start": MlflowSender.start,
    "end": MlflowSender.end,
    "params": MlflowSender.params,
    "tags": MlflowSender.tags,
    "artifact": MlflowSender.artifact,
    "dataset": MlflowSender.dataset,
    "model": MlflowSender.model,
}
"""Senders by kind of entry, except metrics, which are sent together."""


def registered_version(stage_dir: Path, name: str) -> str | None:
    """The version of model `name` that a stage registered, if any."""
    return Sent(Log(stage_dir)).now.versions.get(name)
