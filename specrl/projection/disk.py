"""What a run writes to disk: the size of its checkpoints, and how long they take."""

from __future__ import annotations

from dataclasses import dataclass

from specrl.config import Config
from specrl.models.shapes import ModelShape
from specrl.projection.memory import GIB, MASTER_AND_MOMENTS, Rank
from specrl.projection.traffic import GB, HOST_GB_PER_S, disk_speed

BF16 = 2
OTHER_BYTES = GIB  # of rollouts, logs and reports


@dataclass(frozen=True)
class CheckpointPlan:
    """One checkpoint: FP32 masters and moments of the policy and of the drafter, present and best state."""

    gib: float
    copy_s: float  # that a step waits until the state is copied to host memory
    write_s: float  # until it is written, beside the next step
    number: int  # on disk at the same time, the best one and one that is being written among them


def checkpoint_plan(rank: Rank) -> CheckpointPlan:
    drafter = 2 * rank.drafter_parameters if rank.config.speculation.draft_method.has_weights else 0
    size = (rank.shape.parameters + drafter) * MASTER_AND_MOMENTS
    copy_s = (rank.optimizer_parameters + drafter) * MASTER_AND_MOMENTS / GB / HOST_GB_PER_S
    return CheckpointPlan(size / GIB, copy_s, size / GB / disk_speed(rank.config), most_checkpoints(rank.config))


def most_checkpoints(config: Config) -> int:
    train = config.train
    number = train.keep_checkpoints + 1 + (1 if config.validate_.every else 0)
    return number + (train.num_steps // train.keep_every if train.keep_every else 0)


def disk_bytes(config: Config, shape: ModelShape | None) -> int:
    """Count the policies of three stages, the most checkpoints, and 1 GiB; `shape` is None where it is not known."""
    parameters = shape.parameters if shape is not None else 0
    return parameters * (3 * BF16 + most_checkpoints(config) * MASTER_AND_MOMENTS) + OTHER_BYTES
