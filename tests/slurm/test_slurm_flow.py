"""The flow on a real Slurm of two virtual nodes: one job per stage, whatever happens to the flow."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from flows.cli import invoke
from slurm.backend import FLOW_KEY, JobError, JobKey
from slurm.environment import snapshot_code
from slurm.slurm_backend import SlurmBackend, SlurmJob
from slurm.submit import attach_or_submit, find
from slurm.watch import wait
from specrl.config import Config
from specrl.context import StageContext
from specrl.keys import code_digest, run_keys
from specrl.lifetime.segments import read_segments
from tasks.detached import submit_flow
from tasks.run import begin
from tests.slurm.conftest import ROOT, FlowProcess
from tests.slurm.devcluster import DevCluster
from tests.slurm.test_local_segments import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("devcluster")]
StartFlow = Callable[..., FlowProcess]
MakeRun = Callable[..., Config]
STAGES = ("prepare", "pretrain", "calibrate")


def assert_jobs(config: Config, expected: dict[str, list[str]]) -> None:
    """Slurm's accounting, which hears of jobs with a delay, has these states of all jobs of the stages."""
    deadline = time.monotonic() + 120
    while (found := jobs_of(config)) != expected and time.monotonic() < deadline:
        time.sleep(0.5)
    assert found == expected


def jobs_of(config: Config) -> dict[str, list[str]]:
    """Stage -> states of all jobs that Slurm's accounting knows of at the moment."""
    found: dict[str, list[str]] = {}
    job_key = JobKey(config, "")
    text = subprocess.run(["sacct", "-nPX", "-o", "JobName,State"], capture_output=True, text=True, check=True).stdout
    for line in text.splitlines():
        name, state = line.split("|")
        if name.endswith(job_key.job_name):
            found.setdefault(name.partition("-")[0], []).append(state.split()[0])
    return found


def context_of(config: Config) -> StageContext:
    key = run_keys(config, code_digest(ROOT / "specrl"))["prepare"]
    return StageContext(config, "prepare", key, config.run_dir / "stages" / key, {}, "")


def submit(config: Config) -> tuple[StageContext, SlurmJob]:
    context = context_of(config)
    job = attach_or_submit(context, "tests.slurm.dummy_stage:main", snapshot_code(context.run_dir))
    assert isinstance(job, SlurmJob)
    return context, job


def test_stages_run_once_each_on_two_nodes_and_are_skipped_the_next_time(
    make_run: MakeRun, start_flow: StartFlow
) -> None:
    config = make_run("slurm")
    first = start_flow(config, DUMMY_PREPARE="join")
    output = first.finish()
    assert first.process.returncode == 0, output
    (result,) = config.run_dir.glob("stages/prepare-*/result.json")
    left = json.loads(result.read_text())
    assert left["ranks"] == [0, 1]
    assert left["threads"] == "1"
    assert Path(left["code"]).parent == config.run_dir / "code"
    second = start_flow(config).finish()
    assert second.count("finished before") == len(STAGES)
    assert_jobs(config, {stage: ["COMPLETED"] for stage in STAGES})


def test_a_flow_killed_while_a_stage_runs_finds_its_job_again(make_run: MakeRun, start_flow: StartFlow) -> None:
    config = make_run("slurm")
    first = start_flow(config, DUMMY_PRETRAIN="hold")
    started = first.wait_for("stages/pretrain-*/.starts-0")
    first.kill(signal.SIGKILL)
    output = start_flow(config, DUMMY_PRETRAIN="hold").attach("pretrain")
    assert "pretrain   attached to slurm job" in output
    assert len(started.read_text().splitlines()) == 1
    assert_jobs(config, {stage: ["COMPLETED"] for stage in STAGES})


def test_sigterm_leaves_the_job_and_an_interrupt_cancels_it(make_run: MakeRun, start_flow: StartFlow) -> None:
    config = make_run("slurm")
    first = start_flow(config, DUMMY_PREPARE="hold")
    first.wait_for("stages/prepare-*/.starts-0")
    first.kill(signal.SIGTERM)
    job = find(JobKey(config, next(config.run_dir.glob("stages/prepare-*")).name))
    assert job is not None
    second = start_flow(config, DUMMY_PREPARE="hold")
    while "attached" not in (line := second.process.stdout.readline()):  # type: ignore[union-attr]
        assert line, second.finish()
    output = second.kill(signal.SIGINT)
    assert f"prepare: cancelled slurm job {job.job_id}" in output
    assert_jobs(config, {"prepare": ["CANCELLED"]})


def test_a_failed_stage_is_one_line_with_its_error_and_log(make_run: MakeRun, start_flow: StartFlow) -> None:
    config = make_run("slurm")
    flow = start_flow(config, DUMMY_PREPARE="fail")
    lines = flow.finish().splitlines()
    assert flow.process.returncode == 1
    assert lines[-1].startswith("prepare failed (slurm job ")
    assert "FAILED): ValueError: the stage went wrong, in two lines (rank 1); log: " in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert Path(lines[-1].rpartition("log: ")[2]).is_file()


def test_a_job_is_found_and_completes_though_the_flow_died_right_after_submitting(make_run: MakeRun) -> None:
    config = make_run("slurm")
    context, job = submit(config)
    job_key = JobKey(config, context.key)
    job_key.record_path.unlink()
    again = attach_or_submit(context, "tests.slurm.dummy_stage:main", snapshot_code(context.run_dir))
    assert again is not None
    assert (again.job_id, again.attached) == (job.job_id, True)
    wait(again, context, lambda state, progress: None)
    assert attach_or_submit(context, "tests.slurm.dummy_stage:main", snapshot_code(context.run_dir)) is None


def test_a_flow_and_its_stage_go_on_in_other_jobs_when_they_are_told_of_their_time_limits(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "wait")
    monkeypatch.setenv("SBATCH_PARTITION", "high")  # as sites teach; jobs do not inherit it
    config = make_run("slurm", nodes=1)
    record = begin(config)
    code, stages = record.code_dir(config.run_dir), config.run_dir / "stages"
    stage, flow = stages / record.stage_keys["prepare"], stages / FLOW_KEY
    job = submit_flow(config, code, "tests.slurm.dummy_flow:detached")
    wait_until(lambda: len(read_segments(stage)) == 1)
    partitions = subprocess.run(["squeue", "-h", "-o", "%P"], capture_output=True, text=True, check=True).stdout
    assert partitions.split() == ["high", "high"]
    subprocess.run(["scancel", "--signal=USR2", job.job_id], check=True)
    wait_until(lambda: len(read_segments(flow)) == 2)
    assert invoke(["watch", str(config.run_dir), "--once", "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert view["state"] == "running"
    assert [shown["stage"] for shown in view["stages"] if shown["is_live"]] == ["flow", "prepare"]
    assert submit_flow(config, code).job_id == job.job_id
    subprocess.run(["scancel", "--signal=USR2", read_segments(stage)[0].job_id], check=True)
    wait_until(lambda: read_segments(flow)[-1].reason is not None)
    assert [segment.reason for segment in read_segments(flow)] == ["walltime", "finished"]
    assert [segment.reason for segment in read_segments(stage)] == ["walltime", "finished"]
    assert len((stage / ".starts-0").read_text().splitlines()) == 2


def test_two_runs_of_one_configuration_have_jobs_of_their_own(make_run: MakeRun) -> None:
    config = make_run("slurm")
    other = config.model_copy(update={"name": "other"})
    assert context_of(config).key == context_of(other).key
    jobs = [submit(config)[1], submit(other)[1]]
    assert not jobs[1].attached
    for job in jobs:
        job.cancel()


def test_prefects_cancel_takes_the_jobs_down(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prefect.client.schemas.objects import FlowRun
    from prefect.states import Cancelled

    from flows.pipeline import cancel, pipeline

    monkeypatch.setenv("DUMMY_PREPARE", "hold")
    config = make_run("slurm")
    context, job = submit(config)
    flow_run = FlowRun(flow_id=uuid4(), parameters={"run_dir": str(config.run_dir)})
    cancel(flow=pipeline, flow_run=flow_run, state=Cancelled())
    assert capsys.readouterr().out == f"cancelled slurm job {job.job_id}\n"
    with pytest.raises(JobError, match="CANCELLED"):
        wait(job, context, lambda state, progress: None)


def test_without_sacct_the_queue_tells(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name != "sacct":
            (programs / program.name).symlink_to(program)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("DUMMY_PREPARE", "exit")
    context, job = submit(make_run("slurm"))
    with pytest.raises(JobError, match=r"FAILED\): rank 1: Exited with exit code 7; no Python error"):
        wait(job, context, lambda state, progress: None)
    assert SlurmJob("999999", tmp_path, attached=False).state().detail == "no longer in the queue"


def test_slurm_says_why_it_refuses_a_job(make_run: MakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError, match=r"Slurm refuses the job: Memory specification can not be satisfied") as refused:
        submit(make_run("slurm", memory_gib_per_rank=1000))
    assert "\n" not in str(refused.value)
    assert SlurmBackend().options(make_run("slurm", memory_gib_per_rank=1000), "train").count("allocation failure") == 1
    assert "; expected start: 20" in SlurmBackend().options(make_run("slurm"), "train")
    assert capfd.readouterr().err == ""


def test_the_cluster_comes_up_once_and_listens_on_loopback_alone(devcluster: DevCluster) -> None:
    devcluster.up(2)
    status = devcluster.status()
    assert status.up
    assert list(status.nodes) == ["node1", "node2"]
    pids = {path.read_text().strip() for path in (devcluster.root / "run").glob("*.pid")}
    addresses = {address for pid in pids for address in listening(pid)}
    assert addresses
    assert all(address.endswith("7F") for address in addresses), addresses  # 127.x.y.z, little endian


def listening(pid: str) -> set[str]:
    """Hexadecimal addresses of the TCP sockets on which a process listens."""
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
