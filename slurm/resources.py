"""What a stage asks for, in submitit's words: one translation for this machine and one for Slurm."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from specrl.config import ClusterConfig, Resources

SIGNAL_SECONDS = 90
"""How long before the wall-clock limit a job is told, so that it can end in order and be queued again."""


def signal_seconds(resources: Resources) -> int:
    return min(SIGNAL_SECONDS, resources.minutes * 15)


def local_parameters(resources: Resources) -> dict[str, Any]:
    """Parameters of submitit's LocalExecutor. All nodes are this machine: its ranks are one node's."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = [int(device) for device in visible.split(",") if device.isdigit()]
    return {
        "nodes": 1,
        "tasks_per_node": resources.ranks,
        "gpus_per_node": resources.ranks * resources.gpus_per_rank,
        "visible_gpus": tuple(devices),
        "timeout_min": resources.minutes,
        "signal_delay_s": signal_seconds(resources),
        "stderr_to_stdout": True,
    }


def slurm_parameters(
    name: str, resources: Resources, cluster: ClusterConfig, environment: dict[str, str]
) -> dict[str, Any]:
    """Parameters of submitit's SlurmExecutor.

    Args:
        name: the job's name, by which it is found again.
        environment: exported in the job after `cluster.setup`, which may load modules that set the same names.
    """
    optional = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "gpus_per_node": resources.ranks_per_node * resources.gpus_per_rank or None,
    }
    return {
        "job_name": name,
        "time": resources.minutes,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.ranks_per_node,
        "cpus_per_task": resources.cpus_per_rank,
        "mem": f"{round(resources.memory_gib_per_rank * resources.ranks_per_node * 1024)}M",
        "signal_delay_s": signal_seconds(resources),
        "stderr_to_stdout": True,
        "setup": [*cluster.setup, *(f"export {key}={shlex.quote(value)}" for key, value in environment.items())],
        # Since Slurm 22.05 a step does not inherit --cpus-per-task; and a rank that dies must take the others with it.
        "srun_args": [f"--cpus-per-task={resources.cpus_per_rank}", "--kill-on-bad-exit=1"],
        "additional_parameters": {"requeue": True},
        **{key: value for key, value in optional.items() if value is not None},
    }


def job_environment(code: Path) -> dict[str, str]:
    """Variables of every process of a job: it imports the run's snapshot of the code, and nothing before it.

    The folder of the submission comes last on the path, for a reward function of the user's; `PYTHONSAFEPATH` keeps
    Python from putting it first.
    """
    places = [str(code), os.environ.get("PYTHONPATH", ""), str(Path.cwd())]
    return {
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "PYTHONSAFEPATH": "1",
        "PYTHONFAULTHANDLER": "1",
        "DO_NOT_TRACK": "true",
    }
