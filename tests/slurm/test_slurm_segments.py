"""A stage that goes on in job after job on a real Slurm, whatever ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from flows.folder import write_config
from slurm.environment import snapshot_code
from slurm.slurm_backend import failed_nodes
from slurm.submit import attach_or_submit
from slurm.watch import wait
from specrl.config import Config
from specrl.context import StageContext
from specrl.events import read_events
from tests.integration.disturbances import Disturbed, held, slurm
from tests.slurm.test_local_jobs import nothing

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("devcluster")]
MakeRun = Callable[..., Config]
REASONS = ["walltime", "requeued", "node lost", "preempted", "hang", "finished"]


def context_of(config: Config, partition: str, hang_minutes: float, *setup: str) -> StageContext:
    chosen = {"partition": partition, "hang_minutes": hang_minutes, "setup": setup}
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update=chosen)})
    write_config(config)
    return StageContext(config, "prepare", "prepare-0", config.run_dir / "stages" / "prepare-0", {}, "")


def steps_of(context: StageContext) -> list[str]:
    return (context.stage_dir / "steps.txt").read_text().split()


def test_a_stage_goes_on_whatever_ends_its_job(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "steps")
    monkeypatch.setenv("DUMMY_STEPS", "300")
    monkeypatch.setenv("DUMMY_DISTURBED", "5")
    config = make_run("slurm")
    context = context_of(config, "spot", 0.1, held(config.run_dir, "prepare"))
    job = attach_or_submit(context, "tests.slurm.dummy_stage:main", snapshot_code(context.run_dir))
    assert job is not None
    outcome: list[bool] = []
    flow = threading.Thread(target=lambda: outcome.append(wait(job, context, nothing)))
    flow.start()
    disturbed = Disturbed(context.run_dir, "prepare")
    disturbed.cut_short(seconds=14)
    disturbed.queue_again(2)
    disturbed.lose_a_node(3)
    disturbed.preempt(4)
    disturbed.freeze_a_rank(5)
    flow.join()
    assert outcome == [True]  # one job all the time
    assert disturbed.reasons() == REASONS
    assert set(steps_of(context)) == {str(step) for step in range(300)}
    assert "no sign of life" in job.log(0).read_text()
    assert [event.kind for event in read_events(context.stage_dir)].count("restart") == 5
    # What a real srun says of the node that was lost, and the heartbeats of the rank that was frozen.
    assert failed_nodes(context.run_dir) == {"node1": "it was lost", "node2": "a rank on it hung"}


def test_a_preemption_with_grace_lets_the_step_finish(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUMMY_PREPARE", "steps")
    monkeypatch.setenv("DUMMY_STEPS", "300")
    context = context_of(make_run("slurm", nodes=1), "low", 10)
    job = attach_or_submit(context, "tests.slurm.dummy_stage:main", snapshot_code(context.run_dir))
    assert job is not None
    disturbed = Disturbed(context.run_dir, "prepare")
    disturbed.running(1)
    slurm("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    assert wait(job, context, nothing)
    assert disturbed.reasons() == ["preempted", "finished"]
    assert steps_of(context) == [str(step) for step in range(300)]  # none is done twice
