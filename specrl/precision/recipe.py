"""The FP8 recipe of a policy: which layers compute in FP8 and with which scales, in trainer, engine and export alike.

It belongs to one policy, identified by the digest of its weights and configuration. `train` reads the recipe of
`calibrate`, and writes it with the newest KV-cache scales beside the trained policy.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from specrl.artifacts import digest, write_json
from specrl.distributed import Ranks
from specrl.keys import file_digest
from specrl.models.directory import read_model_config
from specrl.models.families import Family, family_of

Mode = Literal["native", "emulated", "off"]
"""By the device's own kernels, by rounding in the compute type, or not at all."""

RECIPE_FILE = "precision.json"


class NotQuantisedError(RuntimeError):
    """A layer that should compute in FP8 computed in another precision."""


@dataclass(frozen=True)
class KvScales:
    """The scales of FP8 queries, keys and values, one of each for every layer: value = e4m3 x scale."""

    q: list[float]
    k: list[float]
    v: list[float]


@dataclass(frozen=True)
class Recipe:
    """Which layers compute in FP8: all linear layers of the transformer layers except `bf16_layers`, and no others."""

    family: Family
    num_layers: int
    bf16_layers: frozenset[str] = frozenset()  # the trainer's names, such as `layers.3.linear_fc2`
    kv_scales: KvScales | None = None  # None if they were not calibrated

    @property
    def kept_layers(self) -> list[str]:
        return [name for name in layer_names(self.family, self.num_layers) if name in self.bf16_layers]

    @property
    def fp8_layers(self) -> list[str]:
        return [name for name in layer_names(self.family, self.num_layers) if name not in self.bf16_layers]

    @property
    def engine_layers(self) -> list[str]:
        return [engine_name(self.family, name) for name in self.fp8_layers]


def layer_names(family: Family, num_layers: int) -> list[str]:
    """The trainer's names of all linear layers, such as `layers.3.linear_qkv`, in the order of the model."""
    return [f"layers.{layer}.{name}" for layer in range(num_layers) for name in family.layer_names]


def edge_layers(family: Family, num_layers: int, first: int, last: int) -> list[str]:
    kept = [layer for layer in range(num_layers) if layer < first or layer >= num_layers - last]
    return [f"layers.{layer}.{name}" for layer in kept for name in family.layer_names]


def engine_name(family: Family, name: str) -> str:
    """The engine's name for a layer: `layers.3.linear_qkv` is `model.layers.3.self_attn.qkv_proj` there."""
    layers, index, own = name.split(".")
    (found,) = {linear.engine for linear in family.linears if linear.name == own}
    return f"model.{layers}.{index}.{found}"


def policy_digest(policy_dir: Path, ranks: Ranks | None = None) -> str:
    """The digest of weights and configuration that identifies a policy; `ranks` share the files (collective)."""
    files = sorted([*policy_dir.glob("*.safetensors"), policy_dir / "config.json"])
    rank, count = (ranks.rank, ranks.world_size) if ranks is not None else (0, 1)
    own = {path.name: file_digest(path) for path in files[rank::count]}
    parts = ranks.gather(own) if ranks is not None else [own]
    return digest({name: content for part in parts for name, content in part.items()})


def write_recipe(path: Path, recipe: Recipe, policy_dir: Path) -> None:
    value = {
        "format": "e4m3",
        "policy_digest": policy_digest(policy_dir),
        "num_layers": recipe.num_layers,
        "bf16_layers": recipe.kept_layers,
        "kv_scales": asdict(recipe.kv_scales) if recipe.kv_scales else None,
    }
    write_json(path, value)


def load_recipe(path: Path, policy_dir: Path, ranks: Ranks) -> Recipe:
    """The recipe at `path`; raise ValueError if it was made for another policy (collective)."""
    value = json.loads(path.read_text())
    if value["policy_digest"] != policy_digest(policy_dir, ranks):
        raise ValueError(f"{path} was made for another policy than {policy_dir}: run the calibrate stage for this one")
    scales = value["kv_scales"]
    return Recipe(
        family=family_of(read_model_config(policy_dir)),
        num_layers=value["num_layers"],
        bf16_layers=frozenset(value["bf16_layers"]),
        kv_scales=KvScales(**scales) if scales else None,
    )


def recipe_of(policy_dir: Path, ranks: Ranks) -> Recipe | None:
    """The recipe that `train` wrote beside the policy's weights; None if nothing was in FP8 (collective)."""
    path = policy_dir / RECIPE_FILE
    return load_recipe(path, policy_dir, ranks) if path.exists() else None
