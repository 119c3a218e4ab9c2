"""Restoring policy, optimizer and drafter from a checkpoint of any layout, from any folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from specrl.distributed import Ranks
from specrl.precision.recipe import KvScales
from specrl.training.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    check_whole,
    find_damage,
    pieces_by_tensor,
    read_manifest,
    stored_name,
)
from specrl.training.checkpoint.pieces import Shard

DRAFTER_FILE = "drafter.safetensors"

logger = logging.getLogger(__name__)


class CountingOptimizer(Protocol):
    def counters(self) -> dict[str, int]: ...

    def restored(self, counters: Mapping[str, int]) -> None: ...


class TrainedPolicy(Protocol):
    @property
    def ranks(self) -> Ranks: ...

    @property
    def optimizer(self) -> CountingOptimizer: ...

    @property
    def shape_in_words(self) -> str: ...

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]: ...

    def shards(self) -> list[Shard]: ...


class TrainedDrafter(Protocol):
    def state_dict(self) -> Mapping[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class TrainState:
    """All that a step starts from, and all that a checkpoint holds.

    Prompts and seeds are functions of the run's seed and the step. What was learned of times and of acceptance decides
    no token, and is learned again after a restart.
    """

    step: int
    policy: TrainedPolicy
    """The master weights, Adam's moments and the optimizer's counters, of which each rank holds a part."""
    drafter: TrainedDrafter | None
    """The drafter with its optimizer, the same on every rank."""
    kv_scales: KvScales | None = None
    """The scales of an FP8 KV cache with which the engine samples."""


@dataclass(frozen=True)
class Restored:
    """The newest state that was whole."""

    state: TrainState
    damaged: tuple[str, ...] = ()
    """One line for each newer checkpoint that was damaged."""


def load(folder: Path, policy: TrainedPolicy, drafter: TrainedDrafter | None) -> TrainState:
    """Restore policy, optimizer and drafter from one checkpoint, verified, of any layout (collective).

    Each rank reads what it holds. On the layout that wrote the checkpoint the state is equal to the bit. A drafter of
    which the checkpoint knows nothing stays as it is.
    """
    check_whole(folder, policy.ranks)
    return load_verified(folder, policy, drafter)


def load_newest(folders: Sequence[Path], policy: TrainedPolicy, drafter: TrainedDrafter | None) -> Restored:
    """Do what `load` does, with the first of several checkpoints that is whole (collective)."""
    damaged: list[str] = []
    for folder in policy.ranks.gather(list(folders))[0]:
        damage = find_damage(folder, policy.ranks)
        if damage is None:
            return Restored(load_verified(folder, policy, drafter), tuple(damaged))
        damaged.append(f"checkpoint {folder} is damaged and not used: {damage}")
        logger.warning(damaged[-1])
    raise CheckpointError(
        f"there is no whole checkpoint to start from ({'; '.join(damaged)}): put one back from a copy, or let training "
        "start over: specrl resume RUN --restart"
    )


def load_verified(folder: Path, policy: TrainedPolicy, drafter: TrainedDrafter | None) -> TrainState:
    """Do what `load` does, with a checkpoint in which `find_damage` found nothing (collective)."""
    manifest = read_manifest(folder)
    if manifest.model != policy.shape_in_words:
        raise CheckpointError(
            f"checkpoint {folder} holds a policy of {manifest.model}, this run has {policy.shape_in_words}: "
            "resume with the same model, or start a new run from the exported policy"
        )
    _read_shards(folder, manifest, policy.shards())
    policy.optimizer.restored(manifest.counters)
    if drafter is not None and manifest.has_drafter:
        drafter.load_state_dict(load_file(folder / DRAFTER_FILE))
    elif drafter is not None:
        logger.warning("checkpoint %s holds no drafter, which goes on as it was pretrained", folder)
    policy.ranks.barrier()
    scales = KvScales(**manifest.kv_scales) if manifest.kv_scales is not None else None
    return TrainState(manifest.step, policy, drafter, scales)


def load_drafter_state(folder: Path, drafter: TrainedDrafter) -> None:
    """Restore a drafter alone from one checkpoint."""
    if not read_manifest(folder).has_drafter:
        raise CheckpointError(f"checkpoint {folder} holds no drafter: start with another speculation.method")
    drafter.load_state_dict(load_file(folder / DRAFTER_FILE))


@torch.no_grad()
def _read_shards(folder: Path, manifest: Manifest, shards: list[Shard]) -> None:
    held = pieces_by_tensor(manifest)
    files: dict[str, Any] = {}
    for shard in shards:
        offset = 0
        for wanted in shard.pieces:
            missing = wanted.size
            for name, stored in held[wanted.tensor]:
                common = wanted.overlap(stored)
                if common is None:
                    continue
                if name not in files:
                    files[name] = safe_open(folder / name, framework="pt")
                for kind, flat in shard.state.items():
                    part = files[name].get_slice(stored_name(kind, stored))[common.inside(stored)]
                    matrix = flat[offset : offset + wanted.size].view(wanted.shape)
                    matrix[common.inside(wanted)].copy_(part)
                missing -= common.size
            assert not missing, f"{missing} elements of {wanted} are in no file of {folder}"
            offset += wanted.size
