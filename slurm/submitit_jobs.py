"""Code of the backends that use submitit, which places and starts their ranks."""

from __future__ import annotations

from pathlib import Path

from submitit import JobEnvironment
from submitit.helpers import TorchDistributedEnvironment


def rank_environment() -> dict[str, str]:
    """Return the variables from which torch.distributed learns its rank, as submitit knows them."""
    ranks = TorchDistributedEnvironment()
    values = {
        "MASTER_ADDR": ranks.master_addr,
        "MASTER_PORT": ranks.master_port,
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
