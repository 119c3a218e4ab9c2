"""What FP8 means in a run, told once to trainer, engine and exported checkpoint: which layers, which scales.

A recipe belongs to one policy, by the digest of its weights and configuration; `train` takes the one that `calibrate`
left and writes it, with the newest KV-cache scales, into the policy's directory. Imports neither Megatron nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specrl.artifacts import atomic_path
from specrl.keys import files_digest
from specrl.precision.blocks import BLOCK

Mode = Literal["native", "emulated", "off"]
"""How an engine computes FP8: by the device's own kernels, by rounding in the compute type, or not at all."""

RECIPE_FILE = "precision.json"
"""In a policy's directory."""
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The linear layers of a transformer layer, as Megatron fuses them: q/k/v and gate/up are one each."""
ENGINE_LINEARS = {
    "linear_qkv": "self_attn.qkv_proj",
    "linear_proj": "self_attn.o_proj",
    "linear_fc1": "mlp.gate_up_proj",
    "linear_fc2": "mlp.down_proj",
}
"""The engine's names of the same layers: it fuses the same matrices, with their rows in another order."""


class NotQuantisedError(RuntimeError):
    """A run that says FP8 computed something in another precision."""


@dataclass(frozen=True)
class KvScales:
    """Per layer, what FP8 queries, keys and values are multiplied by: value = e4m3 x scale."""

    q: list[float]
    k: list[float]
    v: list[float]


@dataclass(frozen=True)
class Recipe:
    """All linear layers of the transformer layers compute in FP8, but for `bf16_layers`; nothing else does."""

    num_layers: int
    bf16_layers: frozenset[str] = frozenset()
    """Trainer's names, such as `layers.3.linear_fc2`."""
    power_of_two: bool = False
    """Scales rounded up to powers of two."""
    kv_scales: KvScales | None = None

    @property
    def fp8_layers(self) -> list[str]:
        return [name for name in layer_names(self.num_layers) if name not in self.bf16_layers]

    @property
    def engine_layers(self) -> list[str]:
        """The engine's names of `fp8_layers`."""
        return [engine_name(name) for name in self.fp8_layers]

    def with_kv_scales(self, scales: KvScales | None) -> Recipe:
        return replace(self, kv_scales=scales or self.kv_scales)


def layer_names(num_layers: int) -> list[str]:
    return [f"layers.{layer}.{linear}" for layer in range(num_layers) for linear in LINEARS]


def edge_layers(num_layers: int, first: int, last: int) -> list[str]:
    """Names of all linear layers in the first and last transformer layers."""
    kept = [layer for layer in range(num_layers) if layer < first or layer >= num_layers - last]
    return [f"layers.{layer}.{linear}" for layer in kept for linear in LINEARS]


def engine_name(name: str) -> str:
    """`layers.3.linear_qkv` as the engine names it, `model.layers.3.self_attn.qkv_proj`."""
    layers, index, linear = name.split(".")
    return f"model.{layers}.{index}.{ENGINE_LINEARS[linear]}"


def policy_digest(policy_dir: Path) -> str:
    """Digest of the weights and the configuration: what scales belong to."""
    paths = [*policy_dir.glob("*.safetensors"), policy_dir / "config.json"]
    return files_digest((path, path.name) for path in paths)


def write_recipe(path: Path, recipe: Recipe, policy_dir: Path, layers: Mapping[str, Any] | None = None) -> None:
    """JSON of a recipe for the policy in `policy_dir`.

    Args:
        layers: what else is known of each layer: weights' block scales, activations' maxima.
    """
    value = {
        "format": "e4m3",
        "policy_digest": policy_digest(policy_dir),
        "num_layers": recipe.num_layers,
        "power_of_two": recipe.power_of_two,
        "bf16_layers": [name for name in layer_names(recipe.num_layers) if name in recipe.bf16_layers],
        "kv_scales": asdict(recipe.kv_scales) if recipe.kv_scales else None,
        "layers": dict(layers or {}),
    }
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value) + "\n")


def load_recipe(path: Path, policy_dir: Path) -> Recipe:
    """The recipe of the policy in `policy_dir`.

    Raises:
        ValueError: it was calibrated for another model.
    """
    value = json.loads(path.read_text())
    if value["policy_digest"] != policy_digest(policy_dir):
        raise ValueError(f"{path} was calibrated for another model than {policy_dir}: run the calibrate stage for it")
    scales = value["kv_scales"]
    return Recipe(
        num_layers=value["num_layers"],
        bf16_layers=frozenset(value["bf16_layers"]),
        power_of_two=value["power_of_two"],
        kv_scales=KvScales(**scales) if scales else None,
    )


def recipe_of(policy_dir: Path) -> Recipe | None:
    """The recipe that `train` left beside the policy's weights; none where FP8 had no part in it.

    Raises:
        ValueError: it belongs to another policy.
    """
    path = policy_dir / RECIPE_FILE
    return load_recipe(path, policy_dir) if path.exists() else None


def check_shards(hf: Any, trainer_size: int, engine_size: int) -> None:
    """Refuse tensor-parallel sizes under which trainer and engine would cut the same matrix into other blocks.

    Raises:
        ValueError: the sizes differ and a shard's boundary falls inside a block.
    """
    if trainer_size == engine_size:
        return
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    sizes = {
        "query": hf.num_attention_heads * head_dim,
        "key and value": hf.num_key_value_heads * head_dim,
        "MLP": hf.intermediate_size,
    }
    for name, rows in sizes.items():
        for size in {trainer_size, engine_size} - {1}:
            if rows // size % BLOCK:
                raise ValueError(
                    f"policy.tensor_parallel = {trainer_size} and engine.tensor_parallel = {engine_size} with FP8 in "
                    f"both: the model's {rows} {name} rows in {size} parts cut blocks of {BLOCK}, so that the two "
                    "would quantise differently; use equal sizes"
                )
