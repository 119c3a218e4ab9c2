"""The flow of a run as a job, which `specrl run --detach` submits; before its time is up, another job continues it.

`python -m tasks.detached PARENT COMMAND...` becomes the command, which ends with its parent, however the parent ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slurm.backend import FLOW_KEY, Job, JobError
from slurm.submit import attach_or_submit
from slurm.supervisor import WALLTIME_SIGNAL
from specrl import lifetime
from specrl.artifacts import append_line
from specrl.config import Config, parse_config
from specrl.config.sbatch import MEMORY_OPTIONS
from specrl.context import StageContext
from specrl.lifetime import LeftJobError, Stop
from specrl.processes import end_with_parent
from tasks.run import job_settings

IN_JOB = "SPECRL_FLOW_IN_JOB"  # set in a flow that is a job
SIGNAL_SECONDS = 10  # after a flow's end, for news of a signal that ended it
EXIT_STOPPED = 3  # the exit code of a flow ended by `specrl stop`


def submit_flow(config: Config, code: Path, entry: str = "tasks.detached:main") -> Job:
    """Submit the flow of a run that has begun, or attach to it; the job calls `entry`, `module:function`."""
    context = StageContext(_job_config(config), "flow", FLOW_KEY, config.run_dir / "stages" / FLOW_KEY, {}, "")
    taught = {name: value for name, value in os.environ.items() if name.startswith("SBATCH_")}  # for the stages' jobs
    job = attach_or_submit(context, entry, code, **taught)
    assert job is not None  # a flow leaves no result
    return job


def _job_config(config: Config) -> Config:
    large = [name for name in config.cluster.sbatch if name in MEMORY_OPTIONS or name == "exclusive"]
    usual = {"nodes": 1, "ranks_per_node": 1, "gpus_per_rank": 0, "cpus_per_rank": 1, "memory_gib_per_rank": 4.0}
    data = job_settings(config, "flow", {**usual, "sbatch": dict.fromkeys(large, False)})
    # A flow needs the scheduler's commands, but no special node.
    data["cluster"] |= {"container": None, "python": None, "constraint": None, "max_segments": None}
    return parse_config(data)


def main(context: StageContext) -> None:
    """Resume the run, in the job that is its flow."""
    run_flow(context, [sys.executable, "-m", "flows.cli", "resume", str(context.run_dir)])


def run_flow(context: StageContext, command: Sequence[str]) -> None:
    """Run a flow's command as in a shell, although this process has the variables and signals of a rank.

    It leaves the job when the scheduler requests this, and after its stages on `specrl stop`.
    """
    life = lifetime.current()
    life.begin_steps(0)  # or the job would be left at once
    append_line(context.stage_dir / "jobs.jsonl", json.dumps(os.uname().nodename))  # waiting counts as progress
    variables = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    environment = {name: value for name, _, value in (text.partition("=") for text in variables) if name}
    words = [sys.executable, "-m", "tasks.detached", str(os.getpid()), *command]
    flow = subprocess.Popen(words, env={**environment, IN_JOB: "1"}, start_new_session=True)
    ended_at = float("inf")
    while (code := flow.poll()) != 0:
        if life.stop is not None and life.stop.reason != "stopped":
            flow.kill()  # the jobs of its stages continue
            raise LeftJobError(life.stop)
        if code == EXIT_STOPPED:
            raise LeftJobError(Stop("stopped", "specrl stop"))
        ended_at = ended_at if code is None else min(ended_at, time.monotonic())
        if time.monotonic() > ended_at + SIGNAL_SECONDS:
            raise JobError(f"the flow of run {context.config.name} ended with exit code {code}")
        time.sleep(0.5)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    signal.signal(WALLTIME_SIGNAL, signal.SIG_IGN)  # Slurm sends it to all processes of the job
    os.execv(sys.argv[2], sys.argv[2:])
