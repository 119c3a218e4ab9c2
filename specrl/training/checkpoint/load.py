"""Restoring policy, optimizer and drafter from a checkpoint of any layout, from any folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from specrl.precision.recipe import KvScales
from specrl.training.checkpoint.manifest import CheckpointError, StoredPolicy, check_whole, find_damage, read_manifest
from specrl.training.drafter.trainer import Drafter
from specrl.training.megatron.policy import Policy
from specrl.training.pieces import KINDS, MASTER, REFERENCE

DRAFTER_FILE = "drafter.safetensors"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainState:
    """The whole state from which a step starts, and the whole content of a checkpoint.

    Prompts and seeds are functions of the run's seed and the step. Measured times and acceptance affect no token, and
    are measured again after a restart.
    """

    step: int
    policy: Policy
    """The master weights, Adam's moments and the optimizer's counters, of which each rank holds a part; and the
    reference where it is renewed."""
    drafter: Drafter | None
    kv_scales: KvScales | None = None


@dataclass(frozen=True)
class Restored:
    state: TrainState
    damaged: tuple[str, ...] = ()
    """One line for each newer checkpoint that was damaged."""


def load(folder: Path, policy: Policy, drafter: Drafter | None) -> TrainState:
    """Restore policy, optimizer and drafter from one checkpoint, verified, of any layout (collective).

    Each rank reads what it holds. In the layout that wrote the checkpoint, the state is restored bit for bit. A drafter
    that is not in the checkpoint stays as it is.
    """
    check_whole(folder, policy.ranks)
    return _load_verified(folder, policy, drafter)


def load_newest(folders: Sequence[Path], policy: Policy, drafter: Drafter | None) -> Restored:
    """Do what `load` does with the first of several checkpoints that is intact (collective)."""
    damaged: list[str] = []
    for folder in policy.ranks.gather(list(folders))[0]:
        damage = find_damage(folder, policy.ranks)
        if damage is None:
            return Restored(_load_verified(folder, policy, drafter), tuple(damaged))
        damaged.append(f"checkpoint {folder} is damaged and not used: {damage}")
        logger.warning(damaged[-1])
    raise CheckpointError(
        f"there is no intact checkpoint to start from ({'; '.join(damaged)}): restore one from a copy, or let training "
        "start over: specrl resume RUN --restart"
    )


def _load_verified(folder: Path, policy: Policy, drafter: Drafter | None) -> TrainState:
    manifest = read_manifest(folder)
    if manifest.model != policy.shape_in_words:
        raise CheckpointError(
            f"checkpoint {folder} holds a policy of {manifest.model}, this run has {policy.shape_in_words}: "
            "resume with the same model, or start a new run from the exported policy"
        )
    stored = StoredPolicy(folder, manifest)
    if policy.stores_reference and stored.has_reference:
        _read(stored, policy, {MASTER: REFERENCE})  # through the masters, which become the parameters of all ranks
        policy.optimizer.restored(manifest.counters)
        policy.renew_reference()
    _read(stored, policy, {kind: kind for kind in KINDS})
    policy.optimizer.restored(manifest.counters)
    if drafter is not None and manifest.has_drafter:
        drafter.load_state_dict(load_file(folder / DRAFTER_FILE))
    elif drafter is not None:
        logger.warning("checkpoint %s holds no drafter, which goes on as it was pretrained", folder)
    policy.ranks.barrier()
    return TrainState(manifest.step, policy, drafter, manifest.kv_scales)


def _read(stored: StoredPolicy, policy: Policy, kinds: Mapping[str, str]) -> None:
    """Fill this rank's part of the policy; `kinds` maps each kind of tensor to the stored kind it is read from."""
    for shard in policy.shards():
        offset = 0
        for piece in shard.pieces:
            end = offset + piece.size
            stored.read(piece, {kinds[own]: shard.state[own][offset:end].view(piece.shape) for own in kinds})
            offset = end


def load_drafter_state(folder: Path, drafter: Drafter) -> None:
    if not read_manifest(folder).has_drafter:
        raise CheckpointError(f"checkpoint {folder} holds no drafter: start with another speculation.method")
    drafter.load_state_dict(load_file(folder / DRAFTER_FILE))
