"""The log of what is to be sent to MLflow."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest

from slurm.failures import telling_logs
from specrl.artifacts import write_text
from specrl.config import Config, StageName, dump_config
from specrl.lineage.record import RunRecord, write_record
from specrl.tracking import runs
from specrl.tracking.log import Log, Sent
from specrl.tracking.runs import unended
from specrl.tracking.tracker import Tracker


def kinds(folder: Path) -> list[str]:
    return [entry.kind for entry in Sent(Log(folder)).waiting()]


def test_entries_wait_in_their_order_until_they_have_arrived(tmp_path: Path) -> None:
    log, sent = Log(tmp_path), Sent(Log(tmp_path))
    for kind in ("start", "metrics", "end"):
        log.append(kind, value=1)
    first, second, _ = list(sent.waiting())
    assert (first.kind, first.values) == ("start", {"value": 1})
    sent.note([first, second])
    assert kinds(tmp_path) == ["end"]
    assert [entry.kind for entry in log.entries()] == ["start", "metrics", "end"]


def test_what_has_not_arrived_is_sent_again_and_keeps_nothing_else_waiting(tmp_path: Path) -> None:
    for kind in ("artifact", "metrics", "tags"):
        Log(tmp_path).append(kind)
    sent = Sent(Log(tmp_path))
    artifact, metrics, tags = sent.waiting()
    sent.note([artifact], "")
    sent.note([metrics], "run must be active")
    sent.note([tags])
    again = Sent(Log(tmp_path))
    assert again.retried() == [artifact, metrics] and again.waits() and not again.is_complete()
    again.note([artifact])
    assert not again.waits() and not again.is_complete()
    again.note([metrics])
    assert Sent(Log(tmp_path)).is_complete()


def test_what_has_arrived_is_not_sent_again_while_the_disk_is_full(tmp_path: Path) -> None:
    log, sent = Log(tmp_path), Sent(Log(tmp_path))
    log.append("start")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        sent.note(list(sent.waiting()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sent.refresh()
    assert sent.is_complete()
    assert kinds(tmp_path) == ["start"]  # for another process, nothing says that it has arrived
    log.append("end")
    sent.note(list(sent.waiting()))
    assert Sent(log).is_complete()


def test_what_a_step_has_measured_is_logged_once_however_often_it_is_run(tmp_path: Path) -> None:
    def logged() -> list[tuple[int, list[str]]]:
        found = [entry.values for entry in Log(tmp_path).entries()]
        return [(values["step"], sorted(values["metrics"])) for values in found]

    tracker = Tracker(Log(tmp_path))
    tracker.log_new_metrics({"reward/mean": 0.5}, 0)
    tracker.log_new_metrics({"reward/mean": 0.5, "timing/step_s": 2.0}, 0)
    assert logged() == [(0, ["reward/mean"]), (0, ["timing/step_s"])]
    tracker.log_new_metrics({"reward/mean": 0.5}, 1)  # here it was killed
    again = Tracker(Log(tmp_path))
    for step in range(3):
        again.log_new_metrics({"reward/mean": 0.5, "timing/step_s": 3.0}, step)
    assert logged()[2:] == [(1, ["reward/mean"]), (1, ["timing/step_s"]), (2, ["reward/mean", "timing/step_s"])]


@pytest.mark.parametrize("torn", ['{"kind": "me', '{"kind": "metrics", "time_ms": 1}', "{}\n", "\0\0\0"])
def test_an_entry_that_a_kill_cut_off_is_ignored_and_hides_none_after_it(tmp_path: Path, torn: str) -> None:
    Log(tmp_path).append("start")
    with Log(tmp_path).path.open("a") as file:
        file.write(torn)
    assert kinds(tmp_path) == ["start"]
    Log(tmp_path).append("end")
    assert kinds(tmp_path)[-1] == "end"
    sent = Sent(Log(tmp_path))
    sent.note(list(sent.waiting()))
    assert sent.is_complete()


def test_an_earlier_stage_whose_run_a_present_one_goes_on_with_is_not_ended(tmp_path: Path) -> None:
    config = Config(name="run", runs_dir=tmp_path)
    settings = json.loads(dump_config(config))
    keys: dict[StageName, str] = {"prepare": "prepare-1", "train": "train-2"}
    write_record(config.run_dir, RunRecord(settings=settings, code="0", files={}, stage_keys=keys))
    for name, run_id in (("prepare-0", "a"), ("prepare-1", "b"), ("train-1", "c"), ("train-2", "c")):
        Log(config.run_dir / "stages" / name).append("start")
        write_text(config.run_dir / "stages" / name / "mlflow_run_id", f"{run_id}\n")
    assert [log.owner.name for log in unended(config.run_dir)] == ["prepare-0", "prepare-1", "train-2"]
    Log(config.run_dir / "stages" / "train-2").append("end")
    assert [log.owner.name for log in unended(config.run_dir)] == ["prepare-0", "prepare-1"]


def test_what_has_not_changed_since_it_was_logged_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_sync_or_warn", lambda *arguments: None)  # no server
    config = Config(name="demo", runs_dir=tmp_path)
    folder = config.run_dir / "jobs" / "train-0"
    folder.mkdir(parents=True)
    for rank in range(5):
        (folder / f"7_{rank}_log.out").write_text("x")
    (folder / "error-2.json").write_text("{}")
    logs = telling_logs(folder)
    assert [path.name for path in logs] == [f"7_{rank}_log.out" for rank in (0, 2, 4)]

    def logged() -> int:
        runs.finish_parent_run(config, "FINISHED", files={"logs": logs})
        return sum(entry.kind == "artifact" for entry in Log(config.run_dir).entries())

    hour = time.time() - 3600
    for path in logs:
        os.utime(path, (hour, hour))
    assert [logged(), logged()] == [3, 3]
    os.utime(logs[0], (hour + 7200, hour + 7200))
    assert logged() == 4
