"""Weights & Biases gets what is logged, by its own library: offline files are read back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore

from flows.preflight import take_wandb_variables
from specrl.artifacts import write_json
from specrl.config import Config, ConfigError, dump_config
from specrl.context import StageContext
from specrl.distributed import Ranks
from specrl.processes import is_locked
from specrl.tracking.log import Log, Sent
from specrl.tracking.runs import finish_parent_run, stage_run, start_parent_run
from specrl.tracking.tracker import Tracker
from specrl.tracking.weights_biases import ID_FILE, LOCK_FILE, WandbSending, check_wandb, send_to_wandb
from tests.wandb_server import wandb_server

KEY = "train-0123456789ab"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run with offline files, in an environment without a key, whose home is an empty folder."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    tracking = {"wandb": "offline", "experiment": "/Users/me/specrl"}  # Databricks takes paths, W&B names
    return Config.model_validate({"name": "one", "runs_dir": tmp_path / "runs", "tracking": tracking})


def records(config: Config) -> list[list[Any]]:
    """The records of each file of offline mode, the oldest first."""
    files = []
    for path in sorted(config.run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        store = DataStore()
        store.open_for_scan(str(path))
        files.append([])
        while (data := store.scan_data()) is not None:
            files[-1].append(wandb_internal_pb2.Record.FromString(data))
    return files


def rows(file: list[Any]) -> list[dict[str, Any]]:
    """The rows of metrics of a file, without those that the library adds."""
    found = []
    for record in file:
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        found.append({name: value for name, value in items.items() if not name.startswith("_")})
    return [row for row in found if row]


def test_each_metric_is_written_once_to_one_run_however_many_processes_send_it(config: Config) -> None:
    log = Log(config.run_dir / "stages" / KEY)
    tracker = Tracker(log, parent_id="parent")
    tracker.start("train", {})
    tracker.log_params({"precision_training": "fp8"})
    sending = WandbSending(config, log)
    tracker.log_metrics({"reward/mean": 0.25, "timing/step_s": 4.0}, step=3)
    assert sending.close() is None
    assert WandbSending(config, log).close() is None
    sending = WandbSending(config, log)
    tracker.log_metrics({"timing/step_s": 2.0}, step=4)
    tracker.end("FAILED")
    assert sending.close() is None
    assert send_to_wandb(config, [log.owner]) == []
    first, second = records(config)
    assert rows(first) == [{"step": 3, "reward/mean": 0.25, "timing/step_s": 4.0}]
    assert rows(second) == [{"step": 4, "timing/step_s": 2.0}]
    begun = next(record.run for record in first if record.HasField("run"))
    assert (begun.run_id, begun.project, begun.run_group, begun.job_type) == (
        *((log.folder / ID_FILE).read_text(), "specrl", "one", "train"),
    )
    assert {record.run.run_id for record in second if record.HasField("run")} == {begun.run_id}
    settings = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert settings["train"]["num_steps"] == config.train.num_steps
    assert [record.exit.exit_code for file in (first, second) for record in file if record.HasField("exit")] == [0, 1]
    assert list(Path(os.environ["HOME"]).rglob("*")) == [], "all that is written lies in the folder of the run"
    assert len(list((config.run_dir / "wandb").iterdir())) == 2


KILLED = """
import json, os, signal, sys
from pathlib import Path
from specrl.config import parse_config
from specrl.tracking.log import Log
from specrl.tracking.tracker import Tracker
from specrl.tracking.weights_biases import WandbSending
config, log = parse_config(json.loads(sys.argv[1])), Log(Path(sys.argv[2]))
tracker = Tracker(log)
tracker.start("train", {})
sending = WandbSending(config, log)
tracker.log_metrics({"reward/mean": 0.5}, step=1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_job_logged_is_written_without_it(config: Config) -> None:
    folder = config.run_dir / "stages" / KEY
    arguments = [sys.executable, "-c", KILLED, dump_config(config), folder]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    end = time.monotonic() + 120
    while not Sent(Log(folder), "wandb").is_complete():
        assert time.monotonic() < end
        time.sleep(0.1)
    assert [rows(file) for file in records(config)] == [[{"step": 1, "reward/mean": 0.5}]]


def test_a_signal_to_all_processes_of_a_job_does_not_end_what_sends_its_log(config: Config) -> None:
    log = Log(config.run_dir)
    tracker = Tracker(log)
    tracker.start("one", {})
    sending = WandbSending(config, log)
    tracker.log_metrics({"reward/mean": 0.5}, step=1)
    assert sending._process is not None
    lock, end = log.folder / LOCK_FILE, time.monotonic() + 60
    while not is_locked(lock):  # it has begun
        assert time.monotonic() < end
        time.sleep(0.05)
    assert send_to_wandb(config, [config.run_dir]) == ["W&B lacks what one logged: its job is sending it"]
    for number in (signal.SIGUSR2, signal.SIGTERM):
        sending._process.send_signal(number)
    assert sending.close() is None
    assert [rows(file) for file in records(config)] == [[{"step": 1, "reward/mean": 0.5}]]


def test_the_flow_has_the_variables_that_jobs_read_from_their_file(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secrets"
    file.write_text("WANDB_API_KEY=key\nOTHER_KEY=other\n")
    file.chmod(0o600)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    given = config.model_copy(update={"cluster": config.cluster.model_copy(update={"environment_file": file})})
    take_wandb_variables(given)
    assert os.environ["WANDB_API_KEY"] == "key" and "OTHER_KEY" not in os.environ


def test_a_run_and_its_stage_are_runs_of_one_group_and_the_summary_is_the_runs(config: Config) -> None:
    stage = StageContext(config, "train", KEY, config.run_dir / "stages" / KEY, {}, start_parent_run(config))
    with stage_run(stage, Ranks(0, 1, 0, torch.device("cpu"))) as tracker:
        tracker.log_metrics({"reward/mean": 0.5}, step=1)
    write_json(config.run_dir / "summary.json", {"validation": {"accuracy_after": 0.5}})
    finish_parent_run(config, "FINISHED", files={"": [config.run_dir / "summary.json"]})
    files = records(config)
    begun = [next(record.run for record in file if record.HasField("run")) for file in files]
    assert [(run.run_group, run.job_type, run.display_name) for run in begun] == [
        *(("one", "train", KEY), ("one", "run", "one"))
    ]
    assert {"step": 1, "reward/mean": 0.5} in rows(files[0])
    found = {item.key: json.loads(item.value_json) for record in files[1] for item in record.summary.update}
    assert found["validation"] == {"accuracy_after": 0.5}


def test_a_server_that_is_away_costs_only_what_is_sent_later(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    log = Log(config.run_dir)
    tracker = Tracker(log)
    tracker.start("one", {})
    tracker.log_metrics({"reward/mean": 0.5}, step=1)
    online = config.model_copy(update={"tracking": config.tracking.model_copy(update={"wandb": "online"})})
    assert WandbSending(online, log).close(patience_s=1) is not None
    assert Sent(log, "wandb").waits()
    assert WandbSending(config, log).close() is None
    assert [rows(file) for file in records(config)] == [[{"step": 1, "reward/mean": 0.5}]]


def test_online_each_metric_arrives_once_at_one_run_however_many_processes_send_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = config.model_copy(update={"tracking": config.tracking.model_copy(update={"wandb": "online"})})
    log = Log(config.run_dir / "stages" / KEY)
    tracker = Tracker(log)
    tracker.start("train", {})
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        sending = WandbSending(online, log)
        tracker.log_metrics({"reward/mean": 0.25}, step=3)
        assert sending.close() is None
        (log.folder / "sent-wandb.json").unlink()  # as if it had been killed before it noted what arrived
        sending = WandbSending(online, log)
        tracker.log_metrics({"reward/mean": 0.5}, step=4)
        tracker.end("FAILED")
        assert sending.close() is None
        assert send_to_wandb(online, [log.owner]) == []
    [(name, run)] = server.runs.items()
    assert name == (log.folder / ID_FILE).read_text()
    assert run.rows() == [{"step": 3, "reward/mean": 0.25}, {"step": 4, "reward/mean": 0.5}]
    assert run.exit_codes == [0, 1] and len(server.keys) == 1
    assert [run.settings[name] for name in ("project", "groupName", "jobType", "displayName")] == [
        *("specrl", "one", "train", KEY),
    ]


@pytest.mark.parametrize("link", ["wandb", "tracking", "tracking/wandb"])
def test_nothing_is_written_where_a_link_leads(config: Config, tmp_path: Path, link: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (config.run_dir / link).parent.mkdir(parents=True)
    (config.run_dir / link).symlink_to(elsewhere)
    WandbSending(config, Log(config.run_dir)).close()
    assert list(elsewhere.iterdir()) == []


def test_a_key_is_asked_for_before_a_run_begins(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    check_wandb(config, {})
    online = config.model_copy(update={"tracking": config.tracking.model_copy(update={"wandb": "online"})})
    with pytest.raises(
        ConfigError, match=r'tracking[.]wandb = "online": there is no key for api[.]wandb[.]ai: wandb login'
    ):
        check_wandb(online, {})
    check_wandb(online, {"WANDB_API_KEY": "0" * 40})
    for name in ("lab: rl", "100%", "x" * 129):
        odd = online.model_copy(update={"tracking": online.tracking.model_copy(update={"experiment": name})})
        with pytest.raises(ConfigError, match=r"^tracking\.experiment = .*: W&B takes projects of at most 128"):
            check_wandb(odd, {"WANDB_API_KEY": "0" * 40})
    netrc = Path(os.environ["HOME"]) / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    netrc.chmod(0o600)
    check_wandb(online, {})
    with pytest.raises(ConfigError, match=r"no key for wandb[.]example[.]org:8080"):
        check_wandb(online, {"WANDB_BASE_URL": "https://wandb.example.org:8080"})
    netrc.write_text("machine wandb.example.org:8080 login user password secret\n")
    check_wandb(online, {"WANDB_BASE_URL": "https://wandb.example.org:8080"})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="there is no package wandb here"):
        check_wandb(config, {})
