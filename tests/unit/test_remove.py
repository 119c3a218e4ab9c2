"""`specrl rm` removes what it says, and nothing that a link points to, a job works on or the run itself needs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from flows.cli import invoke
from flows.commands import run as commands
from flows.commands.run import remove
from flows.folder import is_worked_on, only_flow, write_config
from slurm.submit import attach_or_submit, live_jobs
from specrl.config import Config, parse_config
from specrl.context import StageContext
from specrl.lineage.record import RunRecord
from tasks.run import begin

ROOT = Path(__file__).parents[2]


def make_run(tmp_path: Path, name: str = "demo") -> tuple[Config, RunRecord]:
    config = parse_config({"name": name, "runs_dir": str(tmp_path / "runs"), "model": {"source": "tiny"}})
    config.run_dir.mkdir(parents=True, mode=0o700)
    write_config(config)
    record = begin(config)
    train = config.run_dir / "stages" / record.stage_keys["train"]
    for part in ("checkpoints/step=000002", "rollouts/step=000000", "steps"):
        (train / part).mkdir(parents=True)
        (train / part / "file").write_bytes(b"x" * 1000)
    (config.run_dir / "rollouts").symlink_to(train / "rollouts")
    return config, record


def rm(config: Config, *arguments: str) -> int:
    return invoke(["rm", config.name, "--runs-dir", str(config.runs_dir), *arguments])


def test_a_whole_run_is_removed_but_nothing_that_it_points_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = make_run(tmp_path)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("precious")
    (config.run_dir / "link").symlink_to(kept)
    (config.run_dir / "stages" / "link").symlink_to(kept)
    os.link(kept / "file", config.run_dir / "stages" / "hard")
    assert rm(config) == 2
    assert "nobody can be asked here; --yes removes without asking" in capsys.readouterr().err
    assert config.run_dir.is_dir()
    assert rm(config, "--yes") == 0
    assert not config.run_dir.exists()
    assert (kept / "file").read_text() == "precious"
    assert "MLflow keeps what the run has logged" in capsys.readouterr().out
    elsewhere, _ = make_run(tmp_path, "elsewhere")
    (config.runs_dir / "linked").symlink_to(elsewhere.run_dir)
    assert invoke(["rm", "linked", "--yes", "--runs-dir", str(config.runs_dir)]) == 2
    assert elsewhere.run_dir.is_dir()


def test_a_run_that_is_worked_on_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, record = make_run(tmp_path)
    with only_flow(config.run_dir, config.cluster):
        assert rm(config, "--yes") == 2
    assert "already being worked on by process" in capsys.readouterr().err
    monkeypatch.setenv("DUMMY_PREPARE", "hold")
    context = StageContext(
        config, "prepare", record.stage_keys["prepare"], config.run_dir / "stages" / "prepare", {}, ""
    )
    job = attach_or_submit(context, "tests.slurm.dummy_stage:main", record.code_dir(config.run_dir))
    assert job is not None
    try:
        assert rm(config, "--yes") == 2
        assert f"local job {job.job_id} works on run demo" in capsys.readouterr().err
    finally:
        job.cancel()
    assert not live_jobs(config)
    assert rm(config, "--yes") == 0


def test_a_run_stays_while_a_job_measures_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, record = make_run(tmp_path)
    cells = config.model_copy(update={"name": "cells", "runs_dir": config.run_dir / "bench"})
    write_config(cells)
    monkeypatch.setenv("DUMMY_BENCH", "hold")
    context = StageContext(cells, "bench", "bench-0", cells.run_dir / "stages" / "bench-0", {}, "")
    job = attach_or_submit(context, "tests.slurm.dummy_stage:main", record.code_dir(config.run_dir))
    assert job is not None
    try:
        assert rm(config, "--yes") == 2
        assert f"works on run {cells.run_dir}; end it first: specrl stop {cells.run_dir}" in capsys.readouterr().err
    finally:
        job.cancel()
    assert rm(config, "--yes") == 0


def test_a_run_is_held_until_nothing_of_it_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = make_run(tmp_path)
    held: dict[str, bool] = {}

    def watched(path: Path) -> None:
        held[path.name] = is_worked_on(config.run_dir)
        remove(path)

    monkeypatch.setattr(commands, "remove", watched)
    assert rm(config, "--yes") == 0
    assert set(held) > {"stages", "config.json"}
    assert list(held)[-1] == ".flow.lock"
    assert all(held.values())


def test_what_cannot_be_removed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = make_run(tmp_path)

    def leave_one(path: Path) -> None:
        if path.name != "stages":
            remove(path)

    monkeypatch.setattr(commands, "remove", leave_one)
    assert rm(config, "--yes") == 2
    assert "cannot be removed (Directory not empty)" in capsys.readouterr().err


def test_a_full_disk_on_which_nothing_was_removed_yet_is_called_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = make_run(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(config.run_dir))

    monkeypatch.setattr("flows.folder.write_text", full)
    assert rm(config, "--yes") == 1
    assert f"{config.run_dir}: No space left on device; make room first" in capsys.readouterr().err
