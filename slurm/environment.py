"""The environment of a rank, set before torch is imported: threads, devices, and where the ranks meet."""

from __future__ import annotations

import os

from specrl.config import ClusterConfig, Resources

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
ONE_HOST = "SPECRL_ONE_HOST"
"""Set by the development cluster: all nodes are this machine, and their names do not resolve."""


def prepare(resources: Resources, cluster: ClusterConfig) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, thread counts and network interfaces.

    Torch and OpenMP read them once, when they are loaded: this runs before either is imported.
    """
    from submitit.helpers import TorchDistributedEnvironment

    environment = dict.fromkeys(THREAD_VARIABLES, str(resources.cpus_per_rank)) | {"TOKENIZERS_PARALLELISM": "false"}
    if not resources.gpus_per_rank:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(environment)
    # Every rank sees all GPUs of its node and picks by LOCAL_RANK (specrl/distributed.py): NCCL wants it so.
    TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    os.environ.update(_network(resources, cluster))


def _network(resources: Resources, cluster: ClusterConfig) -> dict[str, str]:
    """One machine: the loopback interface, whatever the host is called. Several: the interface the user names."""
    local = os.environ.get("SUBMITIT_EXECUTOR") == "local"
    if local or resources.nodes == 1 or os.environ.get(ONE_HOST):
        return {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if cluster.interface:
        return {"GLOO_SOCKET_IFNAME": cluster.interface, "NCCL_SOCKET_IFNAME": cluster.interface}
    return {}
