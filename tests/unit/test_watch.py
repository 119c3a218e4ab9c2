"""`specrl watch` shows stages, training, queue and events from the run's files, and ends with the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from flows.cli import invoke
from flows.commands import watch
from flows.commands.watch import RunView, Watcher
from flows.folder import only_flow, write_config
from slurm.backend import FLOW_KEY, STOP_FILE, JobKey, Record
from slurm.submit import attach_or_submit
from specrl.artifacts import write_json
from specrl.config import STAGES, Config, parse_config
from specrl.context import StageContext
from specrl.events import record_event
from specrl.lifetime.segments import add_to_segment, begin_segment
from specrl.lineage.record import RunRecord, write_record
from specrl.progress import Progress
from tasks.run import begin

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> tuple[Config, RunRecord]:
    config = parse_config(
        {
            "name": "demo",
            "runs_dir": str(tmp_path / "runs"),
            "model": {"source": "tiny"},
            "train": {"num_steps": 20},
            "drafter": {"draft_vocab_size": 64},
            "resources": {"cpus_per_rank": 1, "minutes": 5},
        }
    )
    config.run_dir.mkdir(parents=True, mode=0o700)
    write_config(config)
    return config, begin(config)


def folder(config: Config, record: RunRecord, stage: str) -> Path:
    path = config.run_dir / "stages" / record.stage_keys[stage]  # type: ignore[index]
    path.mkdir(parents=True, exist_ok=True)
    return path


def look(config: Config) -> RunView:
    return Watcher(config.run_dir, config).look()


def listed_state(config: Config, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert invoke(["ls", "--json", "--runs-dir", str(config.runs_dir)]) == 0
    return str(json.loads(capsys.readouterr().out)[0]["state"])


def test_one_look_tells_how_far_a_run_is(run: tuple[Config, RunRecord], capsys: pytest.CaptureFixture[str]) -> None:
    config, record = run
    for stage in ("prepare", "pretrain", "calibrate"):
        write_json(folder(config, record, stage) / "result.json", {"seconds": 61.0})
    train = folder(config, record, "train")
    for step in range(12):
        metrics = {
            "timing/step_s": 30.0,
            "reward/mean": step / 10,
            "spec/acceptance_length": 2.5,
            "performance/generation_tokens_per_s": 123.4,
        }
        write_json(train / "steps" / f"step={step:06d}.json", {"step": step, "metrics": metrics})
    with Progress(train) as progress:
        progress.update(12, 20, message="reward 1.100", unit="step", phase="RL")
    for reason in ("preempted", "hang", "preempted"):
        segment = begin_segment(train, "1", "host")
        add_to_segment(train, segment.number, ended=1.0, reason=reason)
    begin_segment(train, "1", "host")
    for number in range(7):
        record_event(train, "restart", f"event {number}", step=number)
    assert invoke(["watch", "demo", "--once", "--runs-dir", str(config.runs_dir)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "prepare finished 1:01" in lines
    assert any(line.startswith("train no job 12/20 step RL: reward 1.100") for line in lines)
    assert any(line.endswith("(job 4; before it: 2 x preempted, 1 x hang)") for line in lines)
    assert "validate waits" in lines
    assert "step 12/20" in lines
    assert "reward 1.100 (mean of 10 steps 0.650)" in lines
    assert "acceptance length 2.50" in lines
    assert "generation 123 tokens/s" in lines
    assert "ETA of training 4:00" in lines
    assert [line.partition("restart: ")[2] for line in lines if "restart: " in line] == [
        f"event {number}" for number in range(2, 7)
    ]
    assert lines[-1] == "nothing works on run demo; continue it with: specrl resume demo"
    with only_flow(config.run_dir, config.cluster):  # a flow that is between two stages
        assert not look(config).is_over


def test_it_follows_a_job_and_ends_with_it(
    run: tuple[Config, RunRecord], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, record = run
    monkeypatch.setenv("DUMMY_PREPARE", "3")
    context = StageContext(config, "prepare", record.stage_keys["prepare"], folder(config, record, "prepare"), {}, "")
    job = attach_or_submit(context, "tests.slurm.dummy_stage:main", record.code_dir(config.run_dir))
    assert job is not None
    assert invoke(["watch", "demo", "--runs-dir", str(config.runs_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"prepare    runs, local job {job.job_id}")
    assert any(line.startswith("prepare    finished  0:03") for line in lines)
    assert lines[-1] == "nothing works on run demo; continue it with: specrl resume demo"


def test_an_interrupt_ends_the_watching_alone_and_a_stop_the_run(
    run: tuple[Config, RunRecord], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, record = run
    monkeypatch.setenv("DUMMY_PREPARE", "hold")
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.2)
    context = StageContext(config, "prepare", record.stage_keys["prepare"], folder(config, record, "prepare"), {}, "")
    job = attach_or_submit(context, "tests.slurm.dummy_stage:main", record.code_dir(config.run_dir))
    assert job is not None
    try:
        watching = subprocess.Popen(
            [sys.executable, "-u", "-m", "flows.cli", "watch", str(config.run_dir)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert watching.stdout is not None
        assert "runs, local job" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        output, _ = watching.communicate(timeout=300)
        assert output.endswith("run demo goes on\n")
        assert watching.returncode == 0
        assert job.state().phase == "running"
        assert listed_state(config, capsys) == "running"
        assert invoke(["stop", str(config.run_dir), "--wait"]) == 0
        assert job.state().phase == "ended"
        assert listed_state(config, capsys) == "stopped"
    finally:
        job.cancel()


def test_a_run_on_which_nothing_works_is_not_said_to_be_asked_to_stop(
    run: tuple[Config, RunRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    config, record = run
    assert invoke(["stop", str(config.run_dir)]) == 0
    assert capsys.readouterr().out == "nothing works on run demo; continue it with: specrl resume demo\n"
    (config.run_dir / STOP_FILE).unlink()
    for stage in STAGES:
        write_json(folder(config, record, stage) / "result.json", {"seconds": 61.0})
    for words in (["stop"], ["stop", "--wait"]):
        assert invoke([*words, str(config.run_dir)]) == 0
        assert capsys.readouterr().out == "run demo has finished: specrl show demo\n"
    assert not (config.run_dir / STOP_FILE).exists()


def test_cancel_ends_the_jobs_now(
    run: tuple[Config, RunRecord], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, record = run
    monkeypatch.setenv("DUMMY_PREPARE", "hold")
    context = StageContext(config, "prepare", record.stage_keys["prepare"], folder(config, record, "prepare"), {}, "")
    job = attach_or_submit(context, "tests.slurm.dummy_stage:main", record.code_dir(config.run_dir))
    assert job is not None
    assert invoke(["cancel", str(config.run_dir)]) == 0
    assert capsys.readouterr().out == f"cancelled local job {job.job_id}\n"
    assert job.state().phase == "ended"
    assert look(config).state == "stopped"
    assert invoke(["cancel", str(config.run_dir)]) == 0
    assert capsys.readouterr().out == "run demo has no job\n"


def test_a_run_that_failed_is_told_from_one_that_was_stopped(
    run: tuple[Config, RunRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    config, record = run
    assert look(config).state == "stopped"
    prepare = folder(config, record, "prepare")
    segment = begin_segment(prepare, "1", "host")
    add_to_segment(prepare, segment.number, ended=1.0, reason="failed")  # the flow had been killed before
    assert look(config).state == "failed"
    add_to_segment(prepare, begin_segment(prepare, "2", "host").number, ended=1.0, reason="cancelled")
    assert look(config).state == "stopped"
    (config.run_dir / "jobs" / FLOW_KEY).mkdir(parents=True)
    flow = config.run_dir / "stages" / FLOW_KEY
    add_to_segment(flow, begin_segment(flow, "3", "host").number, ended=1.0, reason="failed")
    assert look(config).end.startswith("the flow failed: specrl logs demo --stage flow says why\n")
    write_json(config.run_dir / "outcome.json", {"state": "stopped", "error": "stopped"})
    assert look(config).state == "stopped"
    write_json(config.run_dir / "outcome.json", {"state": "failed", "error": "Slurm refuses the job"})
    assert invoke(["watch", "demo", "--once", "--runs-dir", str(config.runs_dir)]) == 0
    assert "the flow failed: Slurm refuses the job\nnothing works on run demo" in capsys.readouterr().out
    for stage in STAGES:
        write_json(folder(config, record, stage) / "result.json", {"seconds": 1.0})
    assert look(config).state == "finished"


@pytest.mark.parametrize("command", ["ls", "show", "watch", "resume", "doctor"])
def test_json_is_all_that_standard_output_has(
    command: str, run: tuple[Config, RunRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = run
    words = {"watch": ["demo", "--once"], "show": ["demo"], "resume": ["demo", "--dry-run"]}.get(command, [])
    assert invoke([command, *words, "--json", "--runs-dir", str(config.runs_dir)]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    if command == "doctor":
        assert {"name", "status", "found", "fix"} == found[0].keys()
    elif command == "ls":
        assert found[0]["folder"] == str(config.run_dir)
    else:
        assert found["run"] == "demo"


def test_the_logs_of_a_run_are_printed_and_followed(
    run: tuple[Config, RunRecord], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, record = run

    def log(stage: str, name: str, text: str, age: float = 0.0) -> None:
        path = config.run_dir / "jobs" / record.stage_keys.get(stage, FLOW_KEY) / name  # type: ignore[call-overload]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)
        os.utime(path, (time.time() - age,) * 2)

    def logs(*words: str) -> str:
        assert invoke(["logs", str(config.run_dir), *words]) == 0
        return capsys.readouterr().out

    assert invoke(["logs", str(config.run_dir)]) == 2
    assert capsys.readouterr().err == "specrl: run demo has no log of rank 0\n"
    log("prepare", "7_0_log.out", "first\nsecond\n\x1b]0;title\x07", age=60)
    log("prepare", "7_1_log.out", "of rank 1\n", age=60)
    log("flow", "9_0_log.out", "of the flow\n")
    assert logs() == "first\nsecond\n\\x1b]0;title\\x07"
    assert logs("--lines", "0") == ""
    assert logs("--lines", "2") == "second\n\\x1b]0;title\\x07"
    assert logs("--rank", "1", "--stage", "prepare") == "of rank 1\n"
    assert logs("--stage", "flow", "--follow") == "of the flow\n"
    assert invoke(["logs", str(config.run_dir), "--stage", "bench"]) == 2
    assert "--stage bench: allowed: prepare, pretrain" in capsys.readouterr().err
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)

    def work() -> None:
        with only_flow(config.run_dir, config.cluster):
            begun.set()
            time.sleep(0.3)
            log("prepare", "8_0_log.out", "third\n", age=30)
            time.sleep(0.3)
            log("train", "9_0_log.out", "fourth\nfifth")

    begun = threading.Event()
    worker = threading.Thread(target=work)
    worker.start()
    begun.wait()
    assert logs("--follow", "--lines", "1") == "\\x1b]0;title\\x07third\nfourth\nfifth"
    worker.join()


def test_the_local_job_of_somebody_elses_run_is_named(run: tuple[Config, RunRecord]) -> None:
    config, record = run
    key = JobKey(config, record.stage_keys["prepare"])
    assert watch._ask(key, is_trusted=False) == ("no job", False)
    Record("local", "12", None, "host").write(key.record_path)
    assert watch._ask(key, is_trusted=False) == ("local job 12", False)


def test_a_flow_whose_dependency_has_failed_is_said_never_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PATH", f"{tmp_path}:/usr/bin:/bin"), ("SLURM_TMPDIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    config = parse_config({"name": "demo", "runs_dir": str(tmp_path / "runs"), "cluster": {"backend": "slurm"}})
    key = JobKey(config, FLOW_KEY)
    row = f"7|PENDING|DependencyNeverSatisfied|{key.job_name}"
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '{row}'\n")
    (tmp_path / "squeue").chmod(0o755)
    why = "PENDING, DependencyNeverSatisfied: a job that it depends on has not ended as asked"
    assert watch._ask(key, is_trusted=True) == (f"can never start ({why}), slurm job 7", True)


def test_the_model_of_a_run_that_names_none_is_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, settings in {"one": {"model": {"source": "mine"}}, "two": {}, "three": {"model": 3}}.items():
        write_json(tmp_path / name / "config.json", {"name": name, "runs_dir": str(tmp_path), **settings})
    assert invoke(["ls", "--json", "--runs-dir", str(tmp_path)]) == 0
    found = {entry["run"]: entry["model"] for entry in json.loads(capsys.readouterr().out)}
    assert found == {"one": "mine", "two": "?", "three": "?"}


def test_a_run_whose_scheduler_cannot_be_imported_here_is_listed_among_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = {"backend": "no_such_module:Scheduler"}
    config = parse_config({"name": "demo", "runs_dir": str(tmp_path), "model": {"source": "tiny"}, "cluster": cluster})
    config.run_dir.mkdir(mode=0o700)
    write_config(config)
    begin(config)
    assert listed_state(config, capsys) == "unknown"
    assert "cannot be imported" in look(config).stages[0].state


def test_a_stop_holds_for_a_local_job_of_another_host(
    run: tuple[Config, RunRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    config, record = run
    key = JobKey(config, record.stage_keys["prepare"])
    key.folder.mkdir(parents=True)
    Record("local", "12", 7, "login2").write(key.record_path)
    with FileLock(key.record_path.with_suffix(".lock")):
        assert invoke(["stop", str(config.run_dir)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "the job runs on login2 as process 12; resume the run there",
        "demo is asked to stop; continue it with: specrl resume demo",
    ]
    assert (config.run_dir / STOP_FILE).exists()


def test_a_finished_run_that_is_to_train_on_is_not_listed_as_finished(
    run: tuple[Config, RunRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    config, record = run
    for stage in STAGES:
        write_json(folder(config, record, stage) / "result.json", {"seconds": 1.0})
    write_json(config.run_dir / "summary.json", {})
    assert listed_state(config, capsys) == "finished"
    keys = {**record.stage_keys, "train": "train-0123456789ab"}  # of `specrl resume --steps`, whose flow waits
    write_record(config.run_dir, record.model_copy(update={"stage_keys": keys}))
    assert listed_state(config, capsys) == look(config).state == "stopped"
    assert invoke(["ls", "--runs-dir", str(config.runs_dir)]) == 0
    assert " 5/6 " in capsys.readouterr().out
