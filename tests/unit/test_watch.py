"""`specrl watch` shows stages, training, queue and events from the run's files, and ends with the run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import invoke
from flows.commands.watch import Watcher
from flows.folder import only_flow, write_config
from slurm.submit import attach_or_submit
from specrl.artifacts import write_json
from specrl.config import Config, parse_config
from specrl.context import StageContext
from specrl.events import record_event
from specrl.lifetime.segments import add_to_segment, begin_segment
from specrl.lineage.record import RunRecord
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
    with only_flow(config.run_dir):  # a flow that is between two stages
        assert not Watcher(config.run_dir, config).look().is_over


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


def test_an_interrupt_ends_the_watching_alone(run: tuple[Config, RunRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    config, record = run
    monkeypatch.setenv("DUMMY_PREPARE", "hold")
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
    finally:
        job.cancel()
