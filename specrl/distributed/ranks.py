"""The process group of a stage: the place of this process in it, and the few collectives that pass no tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from specrl.processes import free_port

VARIABLES = {
    "TORCH_GLOO_LAZY_INIT": "1",  # otherwise gloo connects all pairs at once, which takes minutes for hundreds of ranks
    # On CPUs each new shape of a BF16 product leaves half a megabyte of compiled code: a gigabyte by default.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "LRU_CACHE_CAPACITY": "256",
}
"""Environment variables of a rank, unless the user has set them."""
TIMEOUT = timedelta(days=7)
"""Far above gloo's half hour: the job's limits (`cluster.hang_minutes`, `cluster.start_minutes`) end a hang."""


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather[T](self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """The values of all ranks, in rank order, on every rank (collective); a thread needs its own group.

        Values are pickled, so pass only a few numbers and messages: data per response or token travels as arrays.
        """
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group)
        return values

    def store(self) -> Store:
        store: Store = _get_default_store()
        return store

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def join() -> Ranks:
    """Join the job's process group (NCCL on GPUs, gloo on CPUs) and pin this process to its device and threads.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are read as torchrun and submitit set them. Unset ones are
    set here, because vLLM reads them: to those of the group or, without one, of a single process.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    alone = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    cuda = torch.cuda.is_available()
    if torch.cuda.device_count() == 1:  # this rank sees only its own GPU
        os.environ["LOCAL_RANK"] = "0"
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    return Ranks(dist.get_rank(), dist.get_world_size(), local_rank, device)


def leave() -> None:
    """Wait for every rank, then leave the process group (collective)."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
