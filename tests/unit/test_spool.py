"""The spool of what is to be sent to MLflow."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from specrl.artifacts import write_text
from specrl.config import Config, StageName, dump_config
from specrl.lineage.record import RunRecord, write_record
from specrl.tracking.runs import unended
from specrl.tracking.spool import Spool


def kinds(spool: Spool) -> list[str]:
    return [entry.kind for entry in spool.waiting()]


def test_entries_wait_in_their_order_until_they_are_acknowledged(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for kind in ("start", "metrics", "end"):
        spool.append(kind, value=1)
    first, second, _ = list(spool.waiting())
    assert (first.kind, first.values) == ("start", {"value": 1})
    spool.acknowledge([first, second])
    assert kinds(Spool(tmp_path)) == ["end"]
    assert [entry.kind for entry in spool.everything()] == ["start", "metrics", "end"]


def test_what_has_arrived_is_not_sent_again_while_the_disk_is_full(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    source = tmp_path / "rollouts.svg"
    source.write_text("drawn")
    spool.append("start", path=spool.keep(source))
    kept = spool.folder / next(spool.waiting()).values["path"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        spool.acknowledge(list(spool.waiting()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not spool.has_waiting()
    assert kinds(Spool(tmp_path)) == ["start"]  # for another process, nothing says that it has arrived
    assert kept.read_text() == "drawn"  # which that process would send
    spool.append("end")
    spool.acknowledge(list(spool.waiting()))
    assert not Spool(tmp_path).has_waiting()
    assert not kept.exists()


@pytest.mark.parametrize("torn", ['{"kind": "me', '{"kind": "metrics", "time_ms": 1}', "{}\n", "\0\0\0"])
def test_an_entry_that_a_kill_cut_off_is_ignored_and_hides_none_after_it(tmp_path: Path, torn: str) -> None:
    Spool(tmp_path).append("start")
    with Spool(tmp_path).path.open("a") as file:
        file.write(torn)
    assert kinds(Spool(tmp_path)) == ["start"]
    again = Spool(tmp_path)
    again.append("end")
    assert kinds(again)[-1] == "end"
    spool = Spool(tmp_path)
    spool.acknowledge(list(spool.waiting()))
    assert not spool.has_waiting()


def test_a_kept_file_stays_as_it_was_until_it_is_sent(tmp_path: Path) -> None:
    source = tmp_path / "rollouts.svg"
    source.write_text("first")
    spool = Spool(tmp_path / "stage")
    spool.append("artifact", path=spool.keep(source))
    replacement = tmp_path / "new"
    replacement.write_text("second")
    replacement.replace(source)
    (entry,) = spool.waiting()
    kept = spool.folder / entry.values["path"]
    assert (kept.name, kept.read_text()) == ("rollouts.svg", "first")
    spool.acknowledge([entry])
    assert not kept.exists()
    assert source.read_text() == "second"


def test_a_file_that_lines_are_appended_to_is_kept_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "events.jsonl"
    source.write_text("1\n")
    spool = Spool(tmp_path / "stage")
    kept = spool.folder / spool.keep(source)
    with source.open("a") as file:
        file.write("2\n")
    assert kept.read_text() == "1\n"


def test_an_earlier_stage_whose_run_a_present_one_goes_on_with_is_not_ended(tmp_path: Path) -> None:
    config = Config(name="run", runs_dir=tmp_path)
    settings = json.loads(dump_config(config))
    keys: dict[StageName, str] = {"prepare": "prepare-1", "train": "train-2"}
    write_record(config.run_dir, RunRecord(settings=settings, code="0", files={}, stage_keys=keys))
    for name, run_id in (("prepare-0", "a"), ("prepare-1", "b"), ("train-1", "c"), ("train-2", "c")):
        spool = Spool(config.run_dir / "stages" / name)
        spool.append("start")
        write_text(spool.owner / "mlflow_run_id", f"{run_id}\n")
    assert [spool.owner.name for spool in unended(config.run_dir)] == ["prepare-0", "prepare-1", "train-2"]
    Spool(config.run_dir / "stages" / "train-2").append("end")
    assert [spool.owner.name for spool in unended(config.run_dir)] == ["prepare-0", "prepare-1"]
