"""Code of the backends that use submitit, which places and starts their ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from submitit import JobEnvironment
from submitit.helpers import TorchDistributedEnvironment

from slurm.ranks.supervisor import warning_seconds
from specrl.config import Resources
from specrl.processes import port_of


def common_parameters(resources: Resources) -> dict[str, Any]:
    """Return the parameters that submitit's executors for this machine and for Slurm share."""
    return {"signal_delay_s": warning_seconds(resources), "stderr_to_stdout": True}


def rank_environment(attempt: int) -> dict[str, str]:
    """Return the variables from which torch.distributed learns its rank, as submitit knows them.

    Args:
        attempt: How often this job was started before. Each time it has another port: the last one may have been taken.
    """
    ranks, job = TorchDistributedEnvironment(), f"{JobEnvironment().job_id}-{attempt}"
    values = {
        "MASTER_ADDR": ranks.master_addr,
        "MASTER_PORT": os.environ.get("MASTER_PORT") or port_of(job),
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.world_size,
        "LOCAL_RANK": ranks.local_rank,
        "LOCAL_WORLD_SIZE": ranks.local_world_size,
    }
    return {name: str(value) for name, value in values.items()}


def other_host() -> str:
    """Return the name of the job's first node or, on that node, of its second one."""
    job = JobEnvironment()
    return str(job.hostnames[1 if job.node == 0 else 0])


def log_path(folder: Path, job_id: str, rank: int) -> Path:
    """Return the file to which a rank of a submitit job prints."""
    return folder / f"{job_id}_{rank}_log.out"
