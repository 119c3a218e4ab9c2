"""The environment variables of a job's processes: where code is imported from, threads, devices and networks."""

from __future__ import annotations

import os
from pathlib import Path

from slurm.backend import Backend, StageRequest
from specrl.config import ClusterConfig

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""For ranks on one machine: they meet on the loopback interface, whatever the host is called."""


def job_environment(code: Path) -> dict[str, str]:
    """Return the variables that a job's processes need before Python starts.

    They make it import the run's snapshot of the code before anything else. The folder of the submission comes last on
    the path, for a reward function of the user's; `PYTHONSAFEPATH` keeps Python from putting it first.

    Args:
        code: The folder with the snapshot of the packages.
    """
    places = [str(code), os.environ.get("PYTHONPATH", ""), str(Path.cwd())]
    return {
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "PYTHONSAFEPATH": "1",
        "PYTHONFAULTHANDLER": "1",
        "DO_NOT_TRACK": "true",
    }


def prepare_rank(request: StageRequest, backend: Backend) -> None:
    """Set the variables that torch and OpenMP read once, when they are loaded. Call this before importing either.

    Every rank sees all GPUs of its node and takes the one of its LOCAL_RANK, as NCCL wants it.
    """
    resources = request.resources
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(resources.cpus_per_rank)), TOKENIZERS_PARALLELISM="false")
    if not resources.gpus_per_rank:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(backend.rank_environment(request))


def named_interface(cluster: ClusterConfig) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use `cluster.interface`; none when they may choose."""
    if cluster.interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": cluster.interface, "NCCL_SOCKET_IFNAME": cluster.interface}
