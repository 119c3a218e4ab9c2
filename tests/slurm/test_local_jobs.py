"""Jobs on this machine: they outlive the flow, are found again, and leave no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from flows.change import change_run
from flows.cli import invoke
from flows.folder import write_config
from flows.server import PrefectServer
from slurm import local as local_backend
from slurm.backend import Failure, JobError, JobKey, State
from slurm.environment import snapshot_code
from slurm.local import LocalJob
from slurm.submit import attach_or_submit, find
from slurm.watch import wait
from specrl.config import Config, ConfigError, change_config
from specrl.context import StageContext
from specrl.keys import code_digest, run_keys
from specrl.lineage.record import read_record
from tasks.run import begin
from tests.prefect_api import request
from tests.slurm.conftest import ROOT, FlowProcess
from tests.slurm.dummy_stage import release

StartFlow = Callable[..., FlowProcess]
MakeRun = Callable[..., Config]
ENTRY = "tests.slurm.dummy_stage:main"


def submit(config: Config) -> tuple[StageContext, LocalJob]:
    key = run_keys(config, code_digest(ROOT / "specrl"))["prepare"]
    context = StageContext(config, "prepare", key, config.run_dir / "stages" / key, {}, "")
    job = attach_or_submit(context, ENTRY, snapshot_code(context.run_dir))
    assert isinstance(job, LocalJob)
    return context, job


def ranks_of(run_dir: Path, count: int = 2) -> list[int]:
    """Process ids of the ranks of `prepare`, once all have started."""
    deadline, starts = time.monotonic() + 120, list[list[str]]()
    while len(starts) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        paths = sorted(run_dir.glob("stages/prepare-*/.starts-*"))
        starts = [pids for path in paths if (pids := path.read_text().split())]  # a file is empty for a moment
    return [int(pids[-1]) for pids in starts]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 120
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def nothing(state: State, progress: object) -> None:
    return


def states_in_prefect(server: PrefectServer, run_dir: Path) -> list[str]:
    """Of all flows of a run, the first one first."""
    wanted = {"flow_runs": {"name": {"any_": [str(run_dir)]}}, "sort": "START_TIME_ASC"}
    with urllib.request.urlopen(request(f"{server.url}/flow_runs/filter", wanted), timeout=30) as response:
        return [run["state_type"] for run in json.load(response)]


def test_a_killed_flow_finds_its_local_job_again(
    make_run: MakeRun, start_flow: StartFlow, server: PrefectServer
) -> None:
    config = make_run("local")
    first = start_flow(config, DUMMY_PREPARE="hold")
    started = first.wait_for("stages/prepare-*/.starts-0")
    first.kill(signal.SIGKILL)
    output = start_flow(config, DUMMY_PREPARE="hold").attach("prepare")
    assert "prepare    attached to local job" in output
    assert len(started.read_text().splitlines()) == 1
    assert len(list(config.run_dir.glob("stages/*/result.json"))) == 3
    assert states_in_prefect(server, config.run_dir) == ["CRASHED", "COMPLETED"]


def test_an_interrupt_ends_the_local_job(make_run: MakeRun, start_flow: StartFlow) -> None:
    config = make_run("local")
    flow = start_flow(config, DUMMY_PREPARE="hold")
    flow.wait_for("stages/prepare-*/.starts-0")
    pids = ranks_of(config.run_dir)
    assert "cancelled local job" in flow.kill(signal.SIGINT)
    wait_until_dead(pids)


@pytest.mark.parametrize("first", ["touch {run}/in-setup", "kill -INT $PPID"])
def test_an_interrupt_ends_a_local_job_that_is_just_being_started(
    make_run: MakeRun, start_flow: StartFlow, first: str
) -> None:
    """Its controller is still in the user's set-up lines, and has written no record by which it would be found; by
    the second line the interrupt comes while the flow is still in the call that starts it."""
    config = make_run("local")
    hold = f"for _ in $(seq 6000); do test -e {config.run_dir}/go && break; sleep 0.1; done"
    slow = config.cluster.model_copy(update={"setup": (first.format(run=config.run_dir), hold)})
    config = config.model_copy(update={"cluster": slow})
    write_config(config)
    flow = start_flow(config, DUMMY_PREPARE="hold")
    if "INT" in first:
        flow.finish()
    else:
        flow.wait_for("in-setup")
        flow.kill(signal.SIGINT)
    (config.run_dir / "go").touch()  # for a controller that was left behind, which would start its ranks now
    time.sleep(5)
    assert not list(config.run_dir.glob("stages/prepare-*/.starts-*"))


def test_an_interrupt_that_was_held_while_a_controller_started_ends_it(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, start, started = make_run("local"), local_backend._start, list[int]()
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"setup": ("sleep 600",)})})
    write_config(config)

    def start_and_interrupt(*arguments: Any) -> subprocess.Popen[bytes]:
        controller = start(*arguments)
        started.append(controller.pid)
        signal.raise_signal(signal.SIGINT)
        return controller

    monkeypatch.setattr(local_backend, "_start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        submit(config)
    wait_until_dead(started)


def test_a_submitted_job_is_attached_to_not_submitted_twice(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "hold")
    context, job = submit(make_run("local"))
    again = attach_or_submit(context, ENTRY, snapshot_code(context.run_dir))
    assert again is not None
    assert (again.job_id, again.attached) == (job.job_id, True)
    ranks_of(context.run_dir)
    release(context.run_dir, "prepare")
    wait(again, context, nothing)
    assert attach_or_submit(context, ENTRY, snapshot_code(context.run_dir)) is None


def test_a_job_is_found_where_it_was_submitted_though_the_run_goes_elsewhere(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "hold")
    context, job = submit(make_run("local"))
    moved = change_config(context.config, ["cluster.backend=slurm"])
    found = find(JobKey(moved, context.key))
    assert found is not None
    assert (found.backend, found.job_id) == ("local", job.job_id)
    job.cancel()


def test_a_change_is_refused_while_a_job_is_at_work_on_it(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "hold")
    able = ["drafter.draft_vocab_size=64", "resources.memory_gib_per_rank=8"]  # a change is checked like a new run
    config = change_config(make_run("local"), able)
    key = begin(config).stage_keys["prepare"]
    context = StageContext(config, "prepare", key, config.run_dir / "stages" / key, {}, "")
    job = attach_or_submit(context, ENTRY, snapshot_code(context.run_dir))
    assert job is not None
    ranks_of(context.run_dir)
    change_run(config.run_dir, ["validate.num_prompts=3"], Console())  # prepare does not read it
    with pytest.raises(ConfigError, match=rf"local job {job.job_id} of run dummy .* specrl cancel dummy"):
        change_run(config.run_dir, ["seed=3"], Console())
    assert find(JobKey(config, key)) is not None
    assert invoke(["cancel", str(config.run_dir)]) == 0
    assert find(JobKey(config, key)) is None
    change_run(config.run_dir, ["seed=3"], Console())
    record = read_record(config.run_dir)
    assert record is not None
    assert record.stage_keys["prepare"] != key
    assert (config.run_dir / "stages" / key).is_dir()


def test_ranks_end_with_their_controller_and_the_stage_can_run_again(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "hold")
    config = make_run("local")
    context, job = submit(config)
    pids = ranks_of(context.run_dir)
    os.kill(int(job.job_id), signal.SIGKILL)
    wait_until_dead(pids)
    assert find(JobKey(config, context.key)) is None
    with pytest.raises(JobError, match="its controller was killed"):
        wait(job, context, nothing)
    monkeypatch.setenv("DUMMY_PREPARE", "0")
    context, job = submit(config)
    wait(job, context, nothing)


def test_ranks_are_children_of_the_controller_and_do_not_hold_its_lock(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "hold")
    context, job = submit(make_run("local"))
    for pid in ranks_of(context.run_dir):
        assert psutil.Process(pid).cmdline()[2:4] == ["-m", "slurm.entry"]
        assert psutil.Process(pid).ppid() == int(job.job_id)
        open_paths = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
        assert not [path for path in open_paths if path.endswith(".lock")]
    job.cancel()


def test_a_job_told_of_its_time_limit_starts_anew_and_goes_on(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "wait")
    context, job = submit(make_run("local"))
    os.kill(ranks_of(context.run_dir)[0], signal.SIGUSR2)
    wait(job, context, nothing)
    assert len((context.stage_dir / ".starts-0").read_text().splitlines()) == 2


def test_a_rank_that_dies_ends_the_job_and_is_named(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "exit")
    context, job = submit(make_run("local"))
    with pytest.raises(JobError, match=r"rank 1 exited with 7\): no Python error; the log of rank 1 ends"):
        wait(job, context, nothing)


class WaitingJob:
    """A Slurm job that waits in the queue for ever."""

    backend = "slurm"
    job_id = "1"
    attached = False
    ask_seconds = 5.0
    folder = Path()
    cancelled = False

    def state(self) -> State:
        return State("pending", "PENDING")

    def cancel(self) -> None:
        self.cancelled = True

    def log(self, rank: int) -> Path:
        return self.folder / "log"

    def failure(self, ranks: int) -> Failure:
        return Failure(0)


def test_a_job_that_never_starts_is_given_up(make_run: MakeRun) -> None:
    config = make_run("local")
    stage_dir = config.run_dir / "stages" / "prepare-0"
    stage_dir.mkdir(parents=True)
    context = StageContext(config, "prepare", "prepare-0", stage_dir, {}, "")
    minutes = iter(range(0, 10**6, 600))
    job = WaitingJob()
    with pytest.raises(JobError, match=r"waited in the queue for longer than cluster.queue_minutes = 1440"):
        wait(job, context, nothing, clock=lambda: 60.0 * next(minutes))
    assert job.cancelled


def test_a_rank_is_not_ended_by_warnings_that_its_environment_makes_errors(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import warnings\nfrom tests.slurm import dummy_stage\n\n\ndef main(context):\n"
    (tmp_path / "warns.py").write_text(f"{text}    warnings.warn('as libraries do')\n    dummy_stage.main(context)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PYTHONWARNINGS", "error::UserWarning")  # as cluster.setup or a module of the site may set it
    config = make_run("local", ranks_per_node=1)
    context = StageContext(config, "prepare", "prepare-0", config.run_dir / "stages" / "prepare-0", {}, "")
    job = attach_or_submit(context, "warns:main", snapshot_code(config.run_dir))
    assert job is not None and wait(job, context, nothing)
