"""Runs in a real MLflow store: sqlite, and servers that stop, hang and fail."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from mlflow import MlflowClient
from transformers import AutoModelForCausalLM

from flows.cli import invoke
from flows.folder import only_flow, write_config
from flows.preflight import check_tracking
from specrl.artifacts import BestPolicy, ExportResult, TrainResult
from specrl.config import Config, DataConfig, ModelConfig, Resources, TrackingConfig
from specrl.context import StageContext
from specrl.distributed import Ranks
from specrl.models.tiny import write_tiny_model
from specrl.report.samples import response_rows
from specrl.schemas import Rollout, rollout_path, write_rollouts
from specrl.stages.export import lineage_tags, register
from specrl.tracking import runs, sync
from specrl.tracking.log import Log, Sent
from specrl.tracking.runs import finish_parent_run, log_to_run, stage_run, start_parent_run
from specrl.tracking.sender import registered_version
from specrl.tracking.store import tracking_uri
from specrl.tracking.sync import Syncing
from specrl.tracking.tracker import Tracker
from tasks.run import begin
from tests.mlflow_server import MlflowServer, Mode, Proxy

TAGS = {"policy_version": "8", "specrl.score": "0.5"}
TINY = ModelConfig(source="tiny", max_length=64)
FIRST = Ranks(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
PATIENCE = [f"{who}_PATIENCE_SECONDS" for who in ("STAGE", "FLOW", "RESUME", "SYNC")]
SECOND = Ranks(rank=1, world_size=2, local_rank=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def make_config(runs_dir: Path, name: str, uri: str | None = None) -> Config:
    return Config(name=name, runs_dir=runs_dir, tracking=TrackingConfig(uri=uri))


def stage_of(config: Config, parent: str) -> StageContext:
    stage_dir = config.run_dir / "stages" / "train-0123456789ab"
    return StageContext(config, "train", "train-0123456789ab", stage_dir, {}, parent)


def client_of(config: Config) -> Any:
    return MlflowClient(tracking_uri(config))


def only_child(config: Config, parent: str) -> Any:
    client = client_of(config)
    experiment = client.get_run(parent).info.experiment_id
    (child,) = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    return child


def statuses(config: Config, parent: str) -> list[str]:
    client = client_of(config)
    experiment = client.get_run(parent).info.experiment_id
    return [run.info.status for run in client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_parent_run_is_made_once_with_its_configuration(runs_dir: Path) -> None:
    config = make_config(runs_dir, "parent")
    run_id = start_parent_run(config)
    assert start_parent_run(config) == run_id
    assert (config.run_dir / "mlflow_run_id").read_text().strip() == run_id
    run = client_of(config).get_run(run_id)
    assert run.info.run_name == "parent"
    assert run.data.params["train.num_steps"] == str(config.train.num_steps)
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    assert artifacts.is_relative_to(runs_dir / "mlartifacts")
    assert (artifacts / "config.json").is_file()
    finish_parent_run(config, "FINISHED")
    run = client_of(config).get_run(run_id)
    assert run.info.status == "FINISHED"


def test_a_resumed_run_with_other_parameters_keeps_the_first_and_shows_the_new_configuration(runs_dir: Path) -> None:
    config = make_config(runs_dir, "changed")
    run_id = start_parent_run(config)
    changed = config.model_copy(update={"seed": 5})
    assert start_parent_run(changed) == run_id
    run = client_of(config).get_run(run_id)
    assert run.data.params["seed"] == "0"
    assert '"seed": 5' in (Path(run.info.artifact_uri.removeprefix("file://")) / "config.json").read_text()


def test_a_copy_of_a_run_sends_everything_to_a_run_of_its_own(runs_dir: Path) -> None:
    config, copy = make_config(runs_dir, "original"), make_config(runs_dir, "copy")
    begin(config)
    parent = start_parent_run(config)
    with stage_run(stage_of(config, parent), FIRST) as tracker:
        tracker.log_metrics({"reward/mean": 0.25}, step=0)
    original = only_child(config, parent).info.run_id
    shutil.copytree(config.run_dir, copy.run_dir)
    with only_flow(copy.run_dir, copy.cluster):
        own = start_parent_run(copy)
        with stage_run(stage_of(copy, own), FIRST) as tracker:
            tracker.log_metrics({"reward/mean": 0.5}, step=1)
    child = only_child(copy, own).info.run_id
    assert own != parent and child != original == only_child(config, parent).info.run_id
    history = client_of(copy).get_metric_history(child, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(0, 0.25), (1, 0.5)]


def test_a_killed_stage_continues_its_child(runs_dir: Path) -> None:
    config = make_config(runs_dir, "killed")
    parent = start_parent_run(config)
    context = stage_of(config, parent)
    killed = stage_run(context, FIRST)
    tracker = killed.__enter__()
    tracker.log_metrics({"reward/mean": 0.25}, step=0)
    tracker.flush()
    wait_until(lambda: statuses(config, parent) == ["RUNNING"])
    finish_parent_run(config, "FAILED")
    assert only_child(config, parent).info.status == "KILLED"

    with stage_run(context, FIRST) as tracker:
        wait_until(lambda: statuses(config, parent) == ["RUNNING"])
        tracker.log_metrics({"reward/mean": 0.5}, step=1)
        tracker.log_metrics({"reward/mean": 0.75}, step=2)
        tracker.log_metrics({"validate/accuracy_after": 0.9})
    child = only_child(config, parent)
    assert (child.info.status, child.info.run_name) == ("FINISHED", "train")
    history = client_of(config).get_metric_history(child.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(0, 0.25), (1, 0.5), (2, 0.75)]
    headlines = client_of(config).get_run(parent).data.metrics
    assert headlines == {"validate/accuracy_after": 0.9, "reward/mean": 0.75}


def test_a_stage_that_raises_is_failed_and_has_logged_what_it_had(runs_dir: Path) -> None:
    config = make_config(runs_dir, "failed")
    parent = start_parent_run(config)
    with pytest.raises(FloatingPointError), stage_run(stage_of(config, parent), FIRST) as tracker:
        for step in range(3):
            tracker.log_metrics({"policy/loss": float(step)}, step)
        raise FloatingPointError
    child = only_child(config, parent)
    assert child.info.status == "FAILED"
    assert child.data.metrics["policy/loss"] == 2.0


def test_only_the_first_rank_logs(runs_dir: Path) -> None:
    config = make_config(runs_dir, "ranks")
    parent = start_parent_run(config)
    with stage_run(stage_of(config, parent), SECOND) as tracker:
        tracker.log_metrics({"reward/mean": 1.0})
        tracker.register_model_version("drafter", runs_dir, {})
        with pytest.raises(AssertionError, match="no/such_metric"):
            tracker.log_metrics({"no/such_metric": 1.0})
    assert not stage_of(config, parent).stage_dir.exists()


def test_a_metric_that_is_not_defined_is_refused(runs_dir: Path) -> None:
    config = make_config(runs_dir, "unknown")
    parent = start_parent_run(config)
    with stage_run(stage_of(config, parent), FIRST) as tracker, pytest.raises(AssertionError, match="no/such_metric"):
        tracker.log_metrics({"no/such_metric": 1.0})


def write_one_rollout(rollouts_dir: Path, step: int) -> None:
    rollout = Rollout(
        *(step, 0, 3, 0, step, step, 11, [1, 2], [3, 4], [-0.5, -0.25], "ab", "b", "stop"), policy_logprobs=[-0.5, -0.2]
    )
    write_rollouts(rollout_path(rollouts_dir, step, 0), [rollout])


def test_artifacts_data_sets_and_model_versions(runs_dir: Path) -> None:
    config = make_config(runs_dir, "artifacts")
    log_everything(config)
    parent = (config.run_dir / "mlflow_run_id").read_text().strip()
    check_everything(config, parent)


def log_everything(config: Config) -> None:
    context = stage_of(config, start_parent_run(config))
    drafter = context.stage_dir / "drafter"
    drafter.mkdir(parents=True)
    (drafter / "config.json").write_text("{}")
    write_one_rollout(config.run_dir / "rollouts", 0)
    with stage_run(context, FIRST) as tracker:
        tracker.log_params({"k": 3})
        tracker.log_artifact(drafter / "config.json", "single")
        tracker.log_text("a line", "plots/line.png")
        tracker.log_rollouts(rollout_path(config.run_dir / "rollouts", 0, 0).parent, "step-0")
        for _ in range(2):
            tracker.register_model_version("drafter", drafter, TAGS)


def check_everything(config: Config, parent: str) -> None:
    client, child = client_of(config), only_child(config, parent)
    files = {
        file.path
        for folder in ("single", "plots", "drafter")
        for file in client.list_artifacts(child.info.run_id, folder)
    }
    assert files == {"single/config.json", "plots/line.png", "drafter/config.json"}
    (data,) = [entry.dataset for entry in child.inputs.dataset_inputs]
    assert data.name == "step-0"
    assert re.fullmatch("[0-9a-f]{12}", data.digest)
    assert str(config.run_dir / "rollouts") in data.source
    (version,) = client.search_model_versions(f"run_id = '{child.info.run_id}'")
    assert (version.name, version.tags) == ("drafter", TAGS | {"specrl.location": version.tags["specrl.location"]})
    assert registered_version(stage_of(config, parent).stage_dir, "drafter") == str(version.version)
    for alias in ("latest", "best"):
        assert client.get_model_version_by_alias("drafter", alias).version == version.version
    assert child.data.params == {"k": "3"}


def test_the_experiment_is_of_model_training_and_has_a_view_of_the_headlines(runs_dir: Path) -> None:
    config = make_config(runs_dir, "kind")
    client = client_of(config)
    experiment = client.get_experiment(client.get_run(start_parent_run(config)).info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    view = json.loads(json.loads(experiment.tags["mlflow.sharedViewState.specrl"])["state"])
    assert view["columnOrder"][1:3] == ["metrics.`validate/accuracy_before`", "metrics.`validate/accuracy_after`"]
    client.set_experiment_tag(experiment.experiment_id, "mlflow.experimentKind", "finetuning")
    start_parent_run(make_config(runs_dir, "kind-kept"))
    assert client.get_experiment(experiment.experiment_id).tags["mlflow.experimentKind"] == "finetuning"


def test_the_parent_run_says_what_it_is_where_it_comes_from_and_what_it_has_reached(
    runs_dir: Path,
) -> None:
    data = runs_dir / "described" / "sums.jsonl"
    data.parent.mkdir()
    data.write_text('{"question": "1 + 1", "answer": "2"}\n')
    config = make_config(runs_dir, "described").model_copy(
        update={"data": DataConfig(source="file", path=data, reward="exact_match")}
    )
    run_id = start_parent_run(config, "Training of a small model.")
    run = client_of(config).get_run(run_id)
    assert run.data.tags["mlflow.note.content"] == "Training of a small model."
    assert run.data.tags["mlflow.source.name"]
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    assert run.data.tags.get("mlflow.source.git.commit", "") == revision
    (entry,) = run.inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("sums.jsonl", run.data.tags["specrl.data.training"])
    log = config.run_dir / "jobs" / "train-0" / "1_0_log.out"
    log.parent.mkdir(parents=True)
    log.write_text("step 1")
    finish_parent_run(config, "FINISHED", "| accuracy | 50% |", {"": [data], "logs/train-0": [log]})
    log_to_run(config, {}, {"bench/sums.jsonl": data.read_text()})
    run = client_of(config).get_run(run_id)
    assert (run.data.tags["mlflow.note.content"], run.info.status) == ("| accuracy | 50% |", "FINISHED")
    found = {
        file.path
        for folder in ("", "logs/train-0", "bench")
        for file in client_of(config).list_artifacts(run_id, folder)
    }
    assert found >= {"config.json", "sums.jsonl", "logs/train-0/1_0_log.out", "bench/sums.jsonl"}


def test_a_large_model_is_registered_without_its_weights(runs_dir: Path) -> None:
    config = make_config(runs_dir, "large")
    config = config.model_copy(update={"tracking": TrackingConfig(max_model_gib=1e-6)})
    context = stage_of(config, start_parent_run(config))
    policy = context.stage_dir / "policy"
    policy.mkdir(parents=True)
    (policy / "config.json").write_text("{}")
    (policy / "model.safetensors").write_bytes(bytes(2000))
    with stage_run(context, FIRST) as tracker:
        tracker.register_model_version("large-policy", policy, lineage_tags(context))
    child = only_child(config, context.mlflow_run_id)
    assert [file.path for file in client_of(config).list_artifacts(child.info.run_id, "policy")] == [
        "policy/config.json"
    ]
    (version,) = client_of(config).search_model_versions("name = 'large-policy'")
    assert version.tags["specrl.location"] == str(policy)
    assert version.tags["specrl.stage"] == context.key
    assert version.tags["specrl.data.training"]


def test_the_tokenizer_of_a_policy_is_kept_without_weights_and_folders(runs_dir: Path) -> None:
    config = make_config(runs_dir, "indexed")
    context = stage_of(config, start_parent_run(config))
    policy = context.stage_dir / "policy"
    (policy / "extra").mkdir(parents=True)
    (policy / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    for name in ("tokenizer.json", "model-1.safetensors", "model.safetensors.index.json", "extra/notes.txt"):
        (policy / name).write_text("{}")
    with stage_run(context, FIRST) as tracker:
        tracker.register_model_version("indexed-policy", policy, {})
    child = only_child(config, context.mlflow_run_id)
    kept = client_of(config).list_artifacts(child.info.run_id, "policy/components/tokenizer")
    assert {Path(file.path).name for file in kept} == {"config.json", "tokenizer.json"}


def test_a_registered_policy_is_loaded_by_mlflow_with_its_weights_or_from_where_they_are(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in (("small", 4.0), ("big", 1e-6)):
        config = make_config(runs_dir, name)
        config = config.model_copy(update={"tracking": TrackingConfig(max_model_gib=limit), "model": TINY})
        context = stage_of(config, start_parent_run(config))
        policy = context.stage_dir / "policy"
        write_tiny_model(config.model, 0, policy)
        with stage_run(context, FIRST) as tracker:
            tracker.register_model_version(f"{name}-policy", policy, {})
        monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri(config))
        pipeline = mlflow.transformers.load_model(f"models:/{name}-policy@best")
        own = AutoModelForCausalLM.from_pretrained(policy)
        assert pipeline.model.state_dict().keys() == own.state_dict().keys()
        assert all(torch.equal(tensor, own.state_dict()[key]) for key, tensor in pipeline.model.state_dict().items())
        (answer,) = pipeline("12 + 7 =", max_new_tokens=4, do_sample=False)
        tokens = pipeline.tokenizer("12 + 7 =", return_tensors="pt")
        wanted = own.generate(**tokens, max_new_tokens=4, do_sample=False)
        assert answer["generated_text"] == pipeline.tokenizer.decode(wanted[0], skip_special_tokens=True)


def test_the_best_policy_is_registered_beside_the_last_where_it_is_another_one(runs_dir: Path) -> None:
    config = make_config(runs_dir, "better-before")
    context = stage_of(config, start_parent_run(config))
    folders = {name: context.stage_dir / name for name in ("policy", "drafter", "best/policy", "best/drafter")}
    for name, folder in folders.items():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(name)
    best = BestPolicy(
        step=4, metric="x", value=0.5, policy_dir=folders["best/policy"], drafter_dir=folders["best/drafter"]
    )
    trained = TrainResult(
        policy_dir=folders["policy"],
        drafter_dir=folders["drafter"],
        policy_step=6,
        best=best,
        steps=6,
        seconds=1,
        step_seconds_median=1,
        timing_share={},
        reward_first=0,
        reward_last=0,
        acceptance_length=1,
        acceptance_rate_per_pos=[],
        mismatch={},
        refit_checks=1,
        refit_failures=0,
        refit_max_abs_logprob_diff=0,
    )
    with stage_run(context, FIRST) as tracker:
        exported = ExportResult(
            policy_dir=folders["policy"], drafter_dir=folders["drafter"], vllm_acceptance_length=1.5, seconds=0
        )
        register(context, trained, exported, tracker)
    client = client_of(config)
    for part in ("policy", "drafter"):
        found = {
            alias: client.get_model_version_by_alias(f"better-before-{part}", alias) for alias in ("best", "latest")
        }
        steps = {alias: version.tags["specrl.policy_version"] for alias, version in found.items()}
        assert steps == {"best": "4", "latest": "6"}
        for alias, name in (("best", f"best/{part}"), ("latest", part)):
            stored = Path(found[alias].source.removeprefix("file://"))
            assert (stored / "config.json").read_text() == name


def test_a_stage_logs_the_load_of_its_machine(runs_dir: Path) -> None:
    config = make_config(runs_dir, "load")
    parent = start_parent_run(config)
    with stage_run(stage_of(config, parent), FIRST):
        pass
    metrics = only_child(config, parent).data.metrics
    assert metrics["system/system_memory_usage_megabytes"] > 0
    assert {"system/cpu_utilization_percentage", "system/disk_available_megabytes"} <= metrics.keys()


def test_a_stage_of_several_nodes_logs_the_load_of_each(runs_dir: Path) -> None:
    config = make_config(runs_dir, "nodes")
    config = config.model_copy(update={"resources": Resources(nodes=2, ranks_per_node=2)})
    context = stage_of(config, start_parent_run(config))
    ranks = [Ranks(rank, 4, rank % 2, torch.device("cpu")) for rank in range(4)]
    for rank in ranks[:0:-1]:
        with stage_run(context, rank):
            pass
    assert [path.name for path in (context.stage_dir / "load").iterdir()] == ["1.json"]
    with stage_run(context, ranks[0]):
        pass
    metrics = only_child(config, context.mlflow_run_id).data.metrics
    assert metrics["system/system_memory_usage_megabytes"] > 0
    assert metrics["system/node_1/system_memory_usage_megabytes"] > 0


def test_responses_are_a_table(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(runs_dir, "table")
    run_id = start_parent_run(config)
    write_config(config)
    for step in range(2):
        write_one_rollout(config.run_dir / "stages" / "train-0123456789ab" / "rollouts", step)
    finish_parent_run(config, "FINISHED", responses=response_rows(config.run_dir))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri(config))
    client = client_of(config)
    table = client.load_table(client.get_run(run_id).info.experiment_id, "responses.json", [run_id])
    assert table["step"].tolist() == [0, 1]
    assert (table["response"][0], table["answer"][0], table["num_tokens"][0]) == ("ab", "b", 2)


def test_another_run_of_the_experiment_finds_it_made(runs_dir: Path) -> None:
    first, second = (start_parent_run(make_config(runs_dir, name)) for name in ("one", "two"))
    client = client_of(make_config(runs_dir, "one"))
    assert client.get_run(first).info.experiment_id == client.get_run(second).info.experiment_id


def test_a_run_the_database_does_not_know_stops_no_stage_and_is_made_anew(
    runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(runs_dir, "forgotten")
    known = start_parent_run(config)
    (config.run_dir / "mlflow_run_id").write_text("0" * 32)
    with stage_run(stage_of(config, "0" * 32), FIRST) as tracker:
        tracker.log_metrics({"reward/mean": 0.5, "reward/std": 0.25})
    (refusal,) = [record.getMessage() for record in caplog.records if "refuses" in record.getMessage()]
    assert "0" * 32 in refusal
    child = client_of(config).get_run((stage_of(config, "").stage_dir / "mlflow_run_id").read_text().strip())
    assert (child.data.metrics["reward/mean"], child.data.metrics["reward/std"]) == (0.5, 0.25)
    assert start_parent_run(config) not in (known, "0" * 32)


def test_what_a_deleted_experiment_has_refused_arrives_when_it_is_restored(
    tmp_path: Path, patient: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path / "runs", "deleted")
    write_config(config)
    parent = start_parent_run(config)
    context, client = stage_of(config, parent), client_of(config)
    experiment = client.get_run(parent).info.experiment_id
    with stage_run(context, FIRST) as tracker:
        wait_until(lambda: Sent(Log(context.stage_dir)).now.position > 0)
        client.delete_experiment(experiment)  # one click; its runs are deleted with it
        log_step(tracker, context.stage_dir, 0)
        wait_until(lambda: bool(Sent(Log(context.stage_dir)).now.missing))
    command = ["sync", "deleted", "--runs-dir", str(config.runs_dir)]
    assert invoke(command) == 2
    assert re.search(r"experiment = specrl: somebody has deleted it in MLflow; restore it", capsys.readouterr().err)
    client.restore_experiment(experiment)
    assert invoke(command) == 0
    child = only_child(config, parent)
    assert child.data.metrics["reward/mean"] == 0.0 and child.info.status == "FINISHED"
    assert [file.path for file in client.list_artifacts(child.info.run_id, "gantt")] == ["gantt/step=0.svg"]


def test_a_stage_whose_experiment_is_deleted_when_it_starts_logs_when_it_is_restored(
    tmp_path: Path, patient: None
) -> None:
    config = make_config(tmp_path / "runs", "gone")
    parent = start_parent_run(config)
    context, client = stage_of(config, parent), client_of(config)
    experiment = client.get_run(parent).info.experiment_id
    client.delete_experiment(experiment)
    with stage_run(context, FIRST) as tracker:
        tracker.log_metrics({"policy/loss": 0.5})
        time.sleep(2)
        client.restore_experiment(experiment)
        tracker.log_metrics({"policy/loss": 0.25}, 1)
    history = client.get_metric_history(only_child(config, parent).info.run_id, "policy/loss")
    assert [(point.step, point.value) for point in history] == [(0, 0.5), (1, 0.25)]


def test_files_that_cannot_be_uploaded_delay_neither_metrics_nor_the_end_of_a_run(
    tmp_path: Path, impatient: None
) -> None:
    config = make_config(tmp_path / "runs", "unwritable")
    parent = start_parent_run(config)
    context, store = stage_of(config, parent), tmp_path / "runs" / "mlartifacts"
    store.rename(tmp_path / "moved")
    store.write_text("no folder")
    context.stage_dir.mkdir(parents=True)
    with stage_run(context, FIRST) as tracker:
        for step in range(2):
            log_step(tracker, context.stage_dir, step)
    child = only_child(config, parent)
    assert child.info.status == "FINISHED" and child.data.metrics["reward/mean"] == 0.1
    store.unlink()
    (tmp_path / "moved").rename(store)
    finish_parent_run(config, "FINISHED")
    files = client_of(config).list_artifacts(child.info.run_id, "gantt")
    assert [file.path for file in files] == ["gantt/step=0.svg", "gantt/step=1.svg"]
    assert Sent(Log(context.stage_dir)).is_complete()


def test_a_server_that_is_away_is_one_clear_line(tmp_path: Path) -> None:
    config = make_config(tmp_path / "runs", "away", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"^tracking\.uri = http://127\.0\.0\.1:9: no MLflow server answers .*\Z"):
        start_parent_run(config)
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is in trouble is asked often, and gets as long as a busy machine needs to answer."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    monkeypatch.setattr(sync, "LONGEST_PAUSE_SECONDS", 0.1)
    for name in PATIENCE:
        monkeypatch.setattr(runs, name, 120.0)


@pytest.fixture
def impatient(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a server that does not run."""
    for name in PATIENCE:
        monkeypatch.setattr(runs, name, 0.5)


def outages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return which of the two lines about an outage were logged, in their order."""
    texts = [record.getMessage() for record in caplog.records]
    return [word for text in texts for word in ("away", "back") if f"is {word} " in text]


def test_a_server_takes_everything_that_a_file_does(tmp_path: Path, server: MlflowServer) -> None:
    config = make_config(tmp_path / "runs", "served", server.uri)
    log_everything(config)
    parent = (config.run_dir / "mlflow_run_id").read_text().strip()
    check_everything(config, parent)
    assert not (config.runs_dir / "mlflow.db").exists()


def log_step(tracker: Tracker, folder: Path, step: int) -> None:
    """Log what a training step does: metrics and a picture, and after some steps a new version of a model."""
    picture = folder / f"step={step}.svg"
    picture.write_text(f"<svg>{step}</svg>")
    tracker.log_metrics({"reward/mean": step / 10, "policy/loss": float("nan")}, step)
    tracker.log_artifact(picture, "gantt")
    model = folder / f"drafter-{step}"
    model.mkdir()
    (model / "weights").write_text(str(step))
    tracker.register_model_version(f"{folder.parents[1].name}-drafter", model, {"specrl.score": str(-step)})
    tracker.flush()


def check_steps(config: Config, parent: str, steps: int) -> None:
    """Check that everything of the steps has arrived, in order and once."""
    client, child = MlflowClient(config.tracking.uri), only_child(config, parent)
    for run_id in (child.info.run_id, parent):
        history = client.get_metric_history(run_id, "reward/mean")
        assert [(point.step, point.value) for point in history] == [(step, step / 10) for step in range(steps)]
    assert len(client.get_metric_history(child.info.run_id, "policy/loss")) == steps
    pictures = client.list_artifacts(child.info.run_id, "gantt")
    assert {Path(file.path).name for file in pictures} == {f"step={step}.svg" for step in range(steps)}
    versions = client.search_model_versions(f"run_id = '{child.info.run_id}'")
    assert sorted((int(found.version), found.tags["specrl.score"]) for found in versions) == [
        (step + 1, str(-step)) for step in range(steps)
    ]
    assert client.get_model_version_by_alias(versions[0].name, "best").version == "1"


def test_nothing_is_lost_or_doubled_while_a_server_is_in_trouble(
    tmp_path: Path, proxy: Proxy, patient: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path / "runs", "troubled", proxy.uri)
    parent = start_parent_run(config)
    context = stage_of(config, parent)
    context.stage_dir.mkdir(parents=True)
    modes: list[Mode] = ["lose", "error", "hang", "lose"]
    proxy.become("lose")  # the server creates the stage's run, and nobody learns of it
    with stage_run(context, FIRST) as tracker:
        for step, mode in enumerate(modes):
            # A request that hangs never reaches the server; one that is given up while the server works on it would be
            # made again beside it.
            monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1" if mode == "hang" else "60")
            proxy.become(mode)
            log_step(tracker, context.stage_dir, step)
            wait_until(lambda: proxy.requests >= 3)
        proxy.become("pass")
        log_step(tracker, context.stage_dir, len(modes))
    check_steps(config, parent, len(modes) + 1)
    assert statuses(config, parent) == ["FINISHED"]
    told = outages(caplog)
    assert told == ["away", "back"] * (len(told) // 2)
    assert told


def test_a_server_that_fails_is_asked_less_and_less_often_at_the_end_of_a_stage(tmp_path: Path) -> None:
    failing = Proxy(9)
    failing.become("error")
    config = make_config(tmp_path, "failing", failing.uri)
    log = Log(config.run_dir)
    log.append("start", name="failing", tags={}, parent=None)
    assert not Syncing(config, log).close(patience_s=2.5)
    failing.close()
    assert failing.requests <= 4  # after 0, 0.5, 1.5 and 3.5 s


def test_a_relaunch_while_the_server_is_stopped_goes_through_and_arrives_later(
    tmp_path: Path,
    server: MlflowServer,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tmp_path / "runs", "relaunched", server.uri)
    write_config(config)
    parent = start_parent_run(config)
    context = stage_of(config, parent)
    context.stage_dir.mkdir(parents=True)
    with stage_run(context, FIRST) as tracker:
        log_step(tracker, context.stage_dir, 0)
        wait_until(lambda: Sent(Log(context.stage_dir)).is_complete())
        server.kill()
        log_step(tracker, context.stage_dir, 1)
    assert check_tracking(config) == []
    assert start_parent_run(config) == parent
    with stage_run(context, FIRST) as tracker:
        log_step(tracker, context.stage_dir, 2)
    finish_parent_run(config, "FINISHED")
    assert "specrl sync relaunched" in caplog.text
    command = ["sync", "relaunched", "--runs-dir", str(config.runs_dir)]
    assert invoke(command) == 2
    assert capsys.readouterr().err.endswith(
        "specrl: MLflow does not answer; what relaunched, train-0123456789ab logged still waits on disk\n"
    )
    server.start()
    monkeypatch.setattr(runs, "SYNC_PATIENCE_SECONDS", 120.0)
    assert invoke(command) == 0
    assert capsys.readouterr().out.endswith("MLflow has everything that relaunched has logged\n")
    check_steps(config, parent, 3)
    assert statuses(config, parent) == ["FINISHED"]
    assert client_of(config).get_run(parent).info.status == "FINISHED"


def test_a_full_disk_costs_only_what_is_logged_meanwhile(runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(runs_dir, "full-disk")
    parent = start_parent_run(config)
    context = stage_of(config, parent)
    with stage_run(context, FIRST) as tracker:
        tracker.log_metrics({"policy/loss": 0.5}, step=0)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (Log(context.stage_dir).path.stat().st_size + 10, hard))
        try:
            for step in (1, 2):
                tracker.log_metrics({"policy/loss": 0.5}, step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        tracker.log_metrics({"policy/loss": 0.5}, step=3)
    history = client_of(config).get_metric_history(only_child(config, parent).info.run_id, "policy/loss")
    assert [point.step for point in history] == [0, 3]
    lines = [record.getMessage() for record in caplog.records if "tracking" in record.name]
    assert sum("is lost until there is room again" in line for line in lines) == 1
    assert sum("2 entries were lost" in line for line in lines) == 1
