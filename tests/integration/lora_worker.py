"""A policy with adapters on layouts of gloo ranks: `python -m tests.integration.lora_worker FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from specrl.config import PolicyConfig
from specrl.config.training import LoraConfig
from specrl.distributed import join, leave
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.checkpoint.load import TrainState, load
from specrl.training.megatron.policy import Policy
from tests.forks import fork, wait
from tests.integration.policy_worker import CONFIG, LAYOUTS, loss, make_model, my_batches, weights_of

# isort: split
from megatron.core import parallel_state

FAMILIES = ("llama-tied", "qwen2-tied")
STORED = "checkpoints/step=000002"
"""What `alone` leaves of its first two updates, below the folder of the family."""


def run(folder: Path, name: str, *, recompute: bool = False) -> dict[str, Any]:
    """Three updates, and the last one again from the checkpoint that one rank has written before it."""
    (tensor, pipeline), ranks = LAYOUTS[name][1], join()
    sizes = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "recompute": recompute}
    config = PolicyConfig(**sizes, **CONFIG, lora=LoraConfig(rank=4))

    def fresh() -> Policy:
        return Policy(folder, config, dtype="float32", ranks=ranks, seed=0)

    policy, metrics = fresh(), list[dict[str, float]]()
    begun = weights_of(policy)
    for step in range(3):
        if step == 2 and name == "alone" and not recompute:
            checkpoints = Checkpoints(folder / "checkpoints", policy, Retention(1))
            checkpoints.save(TrainState(step, policy, None))
            checkpoints.wait()
        metrics.append(policy.train_step(my_batches(policy), loss)[0])
    if not recompute:
        policy.save_adapter(folder / f"{name}-adapter")
    moved = fresh()
    load(folder / STORED, moved, None)
    again = moved.train_step(my_batches(moved), loss)[0]
    return {
        "begun": begun,
        "weights": weights_of(policy),
        "metrics": metrics,
        "again": again,
        "moved": weights_of(moved),
    }


def work(name: str, scratch: Path, rank: int) -> None:
    for family in FAMILIES:
        torch.save(run(scratch / family, name), scratch / f"{family}-{name}-{rank}.pt")
        if family == FAMILIES[0]:
            torch.save(run(scratch / family, name, recompute=True), scratch / f"recompute-{name}-{rank}.pt")
    parallel_state.destroy_model_parallel()
    leave()


def main(scratch: Path) -> None:
    for family in FAMILIES:
        make_model(family, scratch)
    for name, (world, _) in LAYOUTS.items():
        wait(fork(world, lambda rank, name=name: work(name, scratch, rank)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
