"""TensorBoard's files of what a run logs."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from specrl.config import Config
from specrl.tracking.log import Log, Sent
from specrl.tracking.sync import Syncing
from specrl.tracking.tracker import Tracker


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """(name, step, value) of each metric in the files of a folder, by step."""
    found = []
    for path in folder.glob("events.*"):
        data, position = path.read_bytes(), 0
        while position < len(data):  # a record is its length, a checksum, the event, a checksum
            (length,) = struct.unpack_from("<Q", data, position)
            event = Event.FromString(data[position + 12 : position + 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            position += length + 16
    return sorted(found, key=lambda metric: metric[1])


def test_each_metric_is_written_once_in_a_file_of_the_process_that_logs_it(tmp_path: Path) -> None:
    log = Log(tmp_path / "stages" / "train-1")
    tracker = Tracker(log, parent_id="parent")
    tracker.start("train", {})
    tracker.log_metrics({"reward/mean": 0.25, "timing/step_s": 4.0}, step=3)
    tracker.log_metrics({"reward/mean": math.inf}, step=4)
    Tracker(log, parent_id="parent").log_metrics({"timing/step_s": 2.0}, step=5)
    expected = [("reward/mean", 3, 0.25), ("timing/step_s", 3, 4.0), ("reward/mean", 4, math.inf)]
    assert scalars(tmp_path / "tensorboard" / "train-1") == [*expected, ("timing/step_s", 5, 2.0)]
    assert len(list((tmp_path / "tensorboard" / "train-1").iterdir())) == 2
    assert Sent(log).waits(), "MLflow has nothing of it"


def test_a_training_goes_on_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tensorboardX.proto.event_pb2.Event", lambda **_: 1 / 0)
    tracker = Tracker(log := Log(tmp_path / "stages" / "train-1"))
    tracker.log_metrics({"reward/mean": 0.25}, step=3)
    tracker.log_metrics({"reward/mean": 0.5}, step=4)
    assert [entry.values["step"] for entry in log.entries()] == [3, 4]
    [warning] = caplog.messages
    assert "TensorBoard has no more metrics" in warning and "ZeroDivisionError" in warning


def test_metrics_are_written_while_mlflow_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config = Config.model_validate({"name": "run", "runs_dir": tmp_path, "tracking": {"uri": "http://127.0.0.1:9"}})
    log = Log(config.run_dir)
    tracker = Tracker(log)
    tracker.start("run", {})
    tracker.log_metrics({"reward/mean": 0.5}, step=1)
    assert not Syncing(config, log).close(patience_s=0)
    assert scalars(config.run_dir / "tensorboard" / config.name) == [("reward/mean", 1, 0.5)]
