"""Starts the trainer of a tiny policy on eight ranks, as a job does, and counts what that takes of each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing

from specrl.config import PolicyConfig
from specrl.distributed import join, leave
from specrl.models.hf_io import TensorReader
from specrl.precision import recipe
from specrl.processes import free_port
from specrl.training.megatron.policy import Policy
from tests.traffic import refit_traffic

RANKS = 8
LAYOUT = {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}


def _rank_main(rank: int, port: int, scratch: Path) -> None:
    environment = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    found: dict[str, Any] = {"groups": [], "bytes": 0, "hashed": 0}
    _count(found)
    ranks = join()
    recipe.load_recipe(scratch / "scales.json", scratch / "policy", ranks)
    policy = Policy(scratch / "policy", PolicyConfig(**LAYOUT), dtype="float32", ranks=ranks, seed=0)
    ranks.barrier()
    connections = psutil.Process().net_connections("tcp")
    found["connections"] = sum(connection.status == psutil.CONN_ESTABLISHED for connection in connections)
    found["wrong"] = wrong_tensors(policy)
    found["stage"], found["traffic"] = policy.pp_rank, refit_traffic(policy)
    torch.save(found, scratch / f"start-{rank}.pt")
    leave()


def wrong_tensors(policy: Policy) -> list[str]:
    """The names of the tensors that a refit would not send as they are on disk."""
    expected = dict(TensorReader(policy.model_dir).items())
    sent = {name: tensor.clone() for name, tensor in policy.hf_weights() if name in expected}
    return [name for name, tensor in expected.items() if name not in sent or not torch.equal(sent[name], tensor)]


def _count(found: dict[str, Any]) -> None:
    """Note the groups that this rank is in, the bytes of weights that it reads, and how many files it hashes."""
    new_group, read_slice, file_digest = dist.new_group, TensorReader.read_slice, recipe.file_digest

    def counted_group(ranks: list[int], *args: Any, **options: Any) -> Any:
        if dist.get_rank() in ranks:
            found["groups"].append(tuple(sorted(ranks)))
        return new_group(ranks, *args, **options)

    def counted_read(*args: Any, **options: Any) -> torch.Tensor:
        tensor = read_slice(*args, **options)
        found["bytes"] += tensor.nbytes
        return tensor

    def counted_digest(path: Path) -> str:
        found["hashed"] += 1
        return file_digest(path)

    dist.new_group = counted_group  # type: ignore[assignment]
    TensorReader.read_slice = counted_read  # type: ignore[method-assign]
    recipe.file_digest = counted_digest


def start_all(scratch: Path) -> list[dict[str, Any]]:
    """What each rank counted. One process imports what all of them need, and they are copies of it."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.start_up_worker", str(scratch)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    return [torch.load(scratch / f"start-{rank}.pt", weights_only=False) for rank in range(RANKS)]


if __name__ == "__main__":
    arguments = (free_port(), Path(sys.argv[1]))
    torch.multiprocessing.start_processes(_rank_main, arguments, nprocs=RANKS, start_method="fork")
