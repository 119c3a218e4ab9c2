"""MLflow as sites have it: artifacts out of reach, certificates of their own, and things that somebody has deleted."""

from __future__ import annotations

import contextlib
import http.server
import logging
import math
import os
import re
import shutil
import sqlite3
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from flows.cli import invoke
from flows.folder import anchor, write_config
from specrl.config import Config, ConfigError, parse_config
from specrl.report import doctor
from specrl.tracking import runs
from specrl.tracking.log import Log
from specrl.tracking.runs import finish_parent_run, start_parent_run, sync_run
from specrl.tracking.store import RUN_ID_FILE, check_server, connect, import_mlflow, tracking_uri
from specrl.tracking.sync import Syncing
from specrl.tracking.tracker import Tracker


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RESUME", "FLOW", "SYNC"):
        monkeypatch.setattr(runs, f"{name}_PATIENCE_SECONDS", 2.0)


def config_of(folder: Path, **tracking: str) -> Config:
    base = {"name": "one", "runs_dir": str(folder / "runs"), "model": {"source": "tiny"}}
    return parse_config({**base, "tracking": tracking})


def log(config: Config, stage: str, **metrics: float) -> None:
    """A stage that starts, logs and ends, as a job would, without sending anything."""
    parent = (config.run_dir / RUN_ID_FILE).read_text().strip()
    tracker = Tracker(Log(config.run_dir / "stages" / f"{stage}-0"), parent)
    tracker.start(stage, {})
    tracker.log_metrics({name.replace("__", "/"): value for name, value in metrics.items()}, 3)
    tracker.end("FINISHED")


def metrics_of(client: Any, folder: Path) -> tuple[dict[str, float], str]:
    run = client.get_run((folder / RUN_ID_FILE).read_text().strip())
    return dict(run.data.metrics), str(run.info.status)


@pytest.mark.parametrize("location", ["file", "s3"])
def test_artifacts_that_cannot_be_stored_hold_back_artifacts_alone_and_arrive_once_they_can(
    location: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    place = (tmp_path / "file" / "below").as_uri() if location == "file" else "s3://bucket/mlflow"
    config = config_of(tmp_path)
    client = connect(config)
    client.create_experiment("specrl", artifact_location=place)
    with caplog.at_level(logging.WARNING):
        run_id = start_parent_run(config)
        (config.run_dir / "a.out").write_text("a line")
        log(config, "train", reward__mean=0.5)
        finish_parent_run(config, "FINISHED", files={"logs": [config.run_dir / "a.out"]})
    assert metrics_of(client, config.run_dir)[1] == "FINISHED"
    assert metrics_of(client, config.run_dir)[0]["reward/mean"] == 0.5
    assert len(sync_run(config, 2.0)) == 1
    if location == "file":
        (tmp_path / "file").unlink()
        assert sync_run(config, 2.0) == []
        assert {item.path for item in client.list_artifacts(run_id)} == {"config.json", "logs"}


def test_a_store_that_is_out_of_reach_is_waited_for_once_and_not_for_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    config = config_of(tmp_path)
    client = connect(config)
    client.create_experiment("specrl", artifact_location=(tmp_path / "file" / "below").as_uri())
    start_parent_run(config)
    for stage in ("prepare", "pretrain", "train"):
        log(config, stage, reward__mean=0.5)
        folder = config.run_dir / "stages" / f"{stage}-0"
        (folder / "a.out").write_text("a line")
        Tracker(Log(folder)).log_artifact(folder / "a.out")
    waited: list[float] = []
    close = Syncing.close

    def noting(syncing: Syncing, patience_s: float, limit_s: float | None = None) -> bool:
        waited.append(patience_s)
        return close(syncing, patience_s, limit_s)

    monkeypatch.setattr(Syncing, "close", noting)
    assert len(sync_run(config, 2.0)) == 1
    assert waited == [2.0, 0.0, 0.0, 0.0]  # the run's own settings are a file, too
    assert metrics_of(client, config.run_dir / "stages/train-0") == ({"reward/mean": 0.5}, "FINISHED")


def test_a_deleted_experiment_is_said_at_the_start_and_repaired_by_sync(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    start_parent_run(config)
    log(config, "prepare", reward__mean=0.25)
    client = connect(config)
    experiment = client.get_experiment_by_name("specrl").experiment_id
    finish_parent_run(config, "FINISHED")
    client.delete_experiment(experiment)
    log(config, "train", reward__mean=0.5)
    for call in (start_parent_run, lambda config: sync_run(config, 2.0)):
        with pytest.raises(
            ConfigError, match=rf"restore it \(mlflow experiments restore --experiment-id {experiment}\)"
        ):
            call(config)
    client.restore_experiment(experiment)
    assert sync_run(config, 2.0) == []
    assert metrics_of(client, config.run_dir / "stages/train-0") == ({"reward/mean": 0.5}, "FINISHED")
    assert metrics_of(client, config.run_dir)[0]["reward/mean"] == 0.5


def test_what_was_refused_while_the_experiment_was_deleted_is_sent_once_it_is_back(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    start_parent_run(config)
    client = connect(config)
    experiment = client.get_experiment_by_name("specrl").experiment_id
    client.delete_experiment(experiment)
    log(config, "train", reward__mean=0.5)
    finish_parent_run(config, "FINISHED")
    client.restore_experiment(experiment)
    assert sync_run(config, 2.0) == []
    assert metrics_of(client, config.run_dir / "stages/train-0") == ({"reward/mean": 0.5}, "FINISHED")
    assert metrics_of(client, config.run_dir)[1] == "FINISHED"


def test_a_deleted_run_is_made_anew_with_all_that_was_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path)
    write_config(config)
    first = start_parent_run(config)
    log(config, "train", reward__mean=0.5)
    finish_parent_run(config, "FINISHED")
    client = connect(config)
    for folder in (config.run_dir, config.run_dir / "stages/train-0"):
        client.delete_run((folder / RUN_ID_FILE).read_text().strip())
    with caplog.at_level(logging.WARNING):
        assert invoke(["sync", "one", "--runs-dir", str(config.runs_dir)]) == 0
    assert "MLflow has lost the run of one: what is logged is sent again to a new one" in caplog.text
    again = (config.run_dir / RUN_ID_FILE).read_text().strip()
    assert again != first
    assert metrics_of(client, config.run_dir)[1] == "FINISHED"
    child = client.get_run((config.run_dir / "stages/train-0" / RUN_ID_FILE).read_text().strip())
    assert child.data.tags["mlflow.parentRunId"] == again and child.data.metrics == {"reward/mean": 0.5}
    client.delete_run(again)
    assert start_parent_run(config) not in (first, again)
    assert sync_run(config, 2.0) == []


def test_metrics_that_are_no_finite_numbers_arrive(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    start_parent_run(config)
    values = {"policy__loss": math.inf, "policy__kl": -math.inf, "policy__entropy": math.nan, "reward__mean": 0.5}
    log(config, "train", **values)
    finish_parent_run(config, "FINISHED")
    found, status = metrics_of(connect(config), config.run_dir / "stages/train-0")
    assert (status, found["reward/mean"]) == ("FINISHED", 0.5)
    assert found["policy/loss"] > 1e300 and found["policy/kl"] < -1e300 and math.isnan(found["policy/entropy"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server with a certificate of its own; its address, and the certificate."""
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    names = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names], check=True, capture_output=True)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"OK")

        def log_message(self, *_: object) -> None: ...

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listening.socket = context.wrap_socket(listening.socket, server_side=True)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{listening.server_port}", certificate
    listening.shutdown()


VARIABLES = ("MLFLOW_TRACKING_INSECURE_TLS", "MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_certificate_is_taken_as_mlflows_client_takes_it(
    variable: str, server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, certificate = server
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is as before at the end
        monkeypatch.delenv(name)
    config = config_of(tmp_path, uri=uri)
    with pytest.raises(ConfigError, match=r"tracking.uri = https.* no MLflow server answers \(.*CERTIFICATE_VERIFY"):
        check_server(config)
    monkeypatch.setenv(variable, "true" if "INSECURE" in variable else str(certificate))
    check_server(config)


@pytest.mark.parametrize(
    ("status", "body", "refused"),
    [
        (200, "<!DOCTYPE html><title>a page</title>", True),
        (404, "<h1>Not Found</h1>", True),
        (404, '{"detail": "Not Found"}', True),
        (404, '{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "No Experiment with id=0 exists"}', False),
    ],
)
def test_a_page_that_is_no_mlflow_is_refused_before_anything_starts(
    status: int, body: str, refused: bool, tmp_path: Path
) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        config = config_of(tmp_path, uri=f"http://127.0.0.1:{listening.server_port}")
        with pytest.raises(ConfigError, match="what answers there is no MLflow") if refused else nullcontext():
            check_server(config)
        listening.shutdown()


@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize(
    ("status", "body"), [(401, "<h1>Who are you?</h1>"), (403, "Invalid Host header - possible DNS rebinding attack")]
)
def test_a_server_that_takes_nothing_from_this_user_is_refused_before_anything_starts(
    status: int, body: str, healthy: bool, tmp_path: Path
) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_fine = healthy and self.path == "/health"
            self.send_response(200 if is_fine else status)
            self.end_headers()
            self.wfile.write(b"OK" if is_fine else body.encode())

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        config = config_of(tmp_path, uri=f"http://127.0.0.1:{listening.server_port}")
        said = f"{status} {body.removeprefix('<h1>').removesuffix('</h1>')}"
        with pytest.raises(ConfigError, match=rf"MLflow refuses what it is asked \({re.escape(said)}\); .*_TOKEN$"):
            check_server(config)
        listening.shutdown()


def test_the_variable_of_mlflow_stands_for_the_setting_when_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = config_of(tmp_path)
    own = tracking_uri(config)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert tracking_uri(config) == anchor(config).tracking.uri == "http://127.0.0.1:9"
    assert tracking_uri(config_of(tmp_path, uri="http://other")) == "http://other"
    with pytest.raises(ConfigError, match=r"MLFLOW_TRACKING_URI = http://127.0.0.1:9: no MLflow server answers"):
        check_server(config)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / RUN_ID_FILE).write_text("0123\n")
    assert tracking_uri(config) == own  # a run that has begun stays where it is


def test_the_file_of_sqlite_is_looked_for_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    config = config_of(tmp_path, uri="sqlite:///mine.db")
    assert config.tracking.uri == f"sqlite:///{tmp_path}/mine.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///sub/other.db")
    anchored = anchor(config_of(tmp_path))
    (tmp_path / "sub").mkdir()
    check_server(anchored)
    (tmp_path / "sub/other.db").write_text("no database " * 100)
    with pytest.raises(ConfigError, match=rf"^MLFLOW_TRACKING_URI = sqlite:///{tmp_path}/sub/other.db: SQLite cannot"):
        check_server(anchored)
    (tmp_path / "sub/other.db").unlink()
    monkeypatch.chdir(tmp_path / "jobs")  # where a job or a later command runs does not matter
    assert anchored.tracking.uri == f"sqlite:///{tmp_path}/sub/other.db"
    run_id = start_parent_run(config)
    client = connect(config)
    assert client.get_run(run_id).info.artifact_uri.startswith((tmp_path / "mlartifacts").as_uri())
    assert (tmp_path / "mine.db").is_file()
    assert list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("sqlite:///FOLDER/absent/x.db", "there is no folder FOLDER/absent; create it"),
        ("postgresql+not_there://host/db", "Can't load plugin: .*not_there"),
        ("mssql+pymssql://host/db", r"driver is not installed here \(No module named 'pymssql'\): pip install pymssql"),
        ("sqlite:///FOLDER/garbage.db", r"SQLite cannot use it \(file is not a database\); name another file"),
        ("file:///FOLDER/mlruns", "MLflow no longer records in a folder; give a file of SQLite, sqlite:///FILE"),
        ("sqlite:///FOLDER/link.db", "there is no folder FOLDER/gone; create it"),
        ("", r"SQLite cannot use it \(file is not a database\)"),
    ],
)
def test_a_database_that_cannot_be_opened_from_here_is_said_before_anything_starts(
    uri: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "runs").mkdir()
    for file in ("garbage.db", "runs/mlflow.db"):
        (tmp_path / file).write_text("no database " * 100)
    (tmp_path / "link.db").symlink_to(tmp_path / "gone" / "x.db")
    config = config_of(tmp_path, **({"uri": uri.replace("FOLDER", str(tmp_path))} if uri else {}))
    with pytest.raises(ConfigError, match=f"^tracking.uri = .*: .*{words.replace('FOLDER', str(tmp_path))}"):
        check_server(config)


def test_databricks_without_credentials_or_without_its_host_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("DATABRICKS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for uri in ("databricks", "databricks://mine"):
        with pytest.raises(
            ConfigError, match=rf"^tracking\.uri = {uri}: no credentials \(.*\); set DATABRICKS_HOST and"
        ):
            check_server(config_of(tmp_path, uri=uri, experiment="/Users/me/x"))
        assert doctor.check_mlflow(tmp_path, uri).status == "fail"
    handler = http.server.SimpleHTTPRequestHandler
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hosts = {"mine": f"http://127.0.0.1:{server.server_port}", "away": "http://127.0.0.1:9"}
        profiles = [f"[{name}]\nhost = {host}\ntoken = t\n" for name, host in hosts.items()]
        (tmp_path / ".databrickscfg").write_text("".join(profiles))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        check_server(config_of(tmp_path, uri="databricks://mine", experiment="/Users/me/x"))
        assert doctor.check_mlflow(tmp_path, "databricks://mine").status == "ok"
        with pytest.raises(
            ConfigError, match=r"^tracking\.experiment = specrl: Databricks takes paths, such as /Users/"
        ):
            check_server(config_of(tmp_path, uri="databricks://mine"))
        monkeypatch.setenv("DATABRICKS_USERNAME", "me")
        monkeypatch.setenv("DATABRICKS_PASSWORD", "secret")
        with pytest.raises(
            ConfigError, match=r"cannot be used \(validate: more than one [^,]* basic and pat\); "
        ) as both:
            check_server(config_of(tmp_path, uri="databricks://mine", experiment="/Users/me/x"))
        assert "secret" not in str(both.value)
        server.shutdown()
    with pytest.raises(ConfigError, match=r"^tracking\.uri = databricks://away: http://127\.0\.0\.1:9 does not answer"):
        check_server(config_of(tmp_path, uri="databricks://away", experiment="/Users/me/x"))


@pytest.mark.parametrize(
    "credentials",
    [
        {"DATABRICKS_CLIENT_ID": "me", "DATABRICKS_CLIENT_SECRET": "secret"},
        {"ARM_CLIENT_ID": "me", "ARM_CLIENT_SECRET": "secret", "ARM_TENANT_ID": "us"},
    ],
)
def test_a_silent_databricks_is_told_from_credentials_that_it_would_have_to_confirm(
    credentials: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("DATABRICKS_", "ARM_"))]:
        monkeypatch.delenv(name)
    settings = {"HOME": str(tmp_path), "DATABRICKS_HOST": "http://127.0.0.1:9"}
    for name, value in {**settings, **credentials}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^tracking\.uri = databricks: http://127\.0\.0\.1:9 does not answer"):
        check_server(config_of(tmp_path, uri="databricks", experiment="/Users/me/x"))


def test_the_path_of_an_experiment_is_checked_before_any_network(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tracking\.experiment = specrl: Databricks takes paths"):
        check_server(config_of(tmp_path, uri="databricks://nobody"))


@pytest.mark.parametrize("uri", ["sqlite://x.db", "mlruns", "http://user:secret@host"])
def test_a_variable_of_mlflow_that_cannot_be_used_is_named(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI: ") as refused:
        check_server(config_of(tmp_path))
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI: "):
        anchor(config_of(tmp_path))


def test_a_server_that_only_the_environment_names_is_refused_by_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI = .*, or unset MLFLOW_TRACKING_URI"):
        check_server(anchor(config_of(tmp_path)))


def test_a_database_that_fails_is_away_and_no_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path, uri=f"sqlite:///{tmp_path}/x.db")
    (tmp_path / "x.db").write_text("no database " * 100)
    (config.run_dir / RUN_ID_FILE).parent.mkdir(parents=True)
    (config.run_dir / RUN_ID_FILE).write_text("0123\n")
    log(config, "train", reward__mean=0.5)
    with caplog.at_level(logging.WARNING):
        assert sync_run(config, 0.1) != []
    assert "file is not a database" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_database_that_cannot_be_reached_is_tried_once_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("mlflow.store.db.utils.time.sleep", pauses.append)
    (tmp_path / "x.db").mkdir()
    with pytest.raises(OperationalError, match="unable to open database file"):
        connect(config_of(tmp_path, uri=f"sqlite:///{tmp_path}/x.db")).search_experiments()
    assert pauses == []


def test_a_database_whose_writer_was_killed_is_usable(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "written.db")) as database:
        database.executescript("PRAGMA cache_size = 1; CREATE TABLE a (b); INSERT INTO a VALUES (zeroblob(9999));")
        database.execute("UPDATE a SET b = zeroblob(999999)")  # spills: the journal says what the file had before
        for ending in ("", "-journal"):
            shutil.copy(tmp_path / f"written.db{ending}", tmp_path / f"left.db{ending}")
    check_server(config_of(tmp_path, uri=f"sqlite:///{tmp_path}/left.db"))


def test_the_rollouts_of_a_run_that_was_renamed_before_mlflow_was_back_are_recorded(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    start_parent_run(config)
    stage_dir = config.run_dir / "stages" / "train-0"
    (stage_dir / "rollouts").mkdir(parents=True)
    (stage_dir / "rollouts" / "step=000000.arrow").write_bytes(b"rows")
    tracker = Tracker(Log(stage_dir), (config.run_dir / RUN_ID_FILE).read_text().strip())
    tracker.start("train", {})
    tracker.log_rollouts(stage_dir / "rollouts", "rollouts")
    tracker.end("FINISHED")
    renamed = config.model_copy(update={"name": "two"})
    config.run_dir.rename(renamed.run_dir)
    assert sync_run(renamed, 2.0) == []
    run_id = (renamed.run_dir / "stages" / "train-0" / RUN_ID_FILE).read_text().strip()
    (found,) = connect(renamed).get_run(run_id).inputs.dataset_inputs
    assert str(renamed.run_dir) in found.dataset.source


class Locked(http.server.BaseHTTPRequestHandler):
    """An MLflow server that answers those alone who give a password."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 401)
        self.end_headers()
        self.wfile.write(b"OK" if self.path == "/health" else b"You are not authenticated.")

    def log_message(self, *_: object) -> None: ...


def test_a_store_that_takes_no_run_is_one_line_at_the_start_and_nothing_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.executescript("CREATE TABLE alembic_version (version_num); INSERT INTO alembic_version VALUES ('x9')")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for uri, words in (
            (f"http://127.0.0.1:{server.server_port}", r"MLflow refuses .*\(401 You are not authenticated"),
            (f"sqlite:///{tmp_path}/x.db", "MLflow takes no run of one: .*Can't locate revision identified by 'x9'"),
        ):
            config = config_of(tmp_path, uri=uri)
            with pytest.raises(ConfigError, match=rf"^tracking\.uri = {uri}: {words}"):
                start_parent_run(config)
            assert not config.run_dir.exists() and caplog.records == []
        server.shutdown()


def test_an_error_without_words_is_named_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(_: Config) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(runs, "connect", reset)
    with pytest.raises(ConfigError, match=r"MLflow takes no run of one: ConnectionResetError$"):
        start_parent_run(config_of(tmp_path, uri=f"sqlite:///{tmp_path}/x.db"))


def test_a_database_whose_creation_was_interrupted_is_created_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    import_mlflow()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mlflow.store.db.utils._upgrade_db", interrupt)
        with pytest.raises(KeyboardInterrupt):
            connect(config)
    assert [path.name for path in config.runs_dir.iterdir() if path.suffix != ".lock"] == []
    assert connect(config).search_experiments()
