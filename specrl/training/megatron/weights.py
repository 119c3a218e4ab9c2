"""Weights between Hugging Face names and Megatron's shards, both ways, tensor by tensor, bit by bit.

A `Parameter` names one Megatron parameter, the Hugging Face tensors it is made of, and how tensor parallelism splits
it. The list of them is the same on every rank, so that collectives match while weights stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import specrl.training.megatron.cpu_shim  # noqa: F401  (must precede megatron)

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor

from specrl.training.megatron.parallel import from_stage

Split = Literal["none", "rows", "columns", "gate_up", "qkv", "vocabulary"]
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class Parameter:
    name: str
    """Megatron's, counting layers from 0 in each pipeline stage."""
    stage: int
    """Pipeline stage that holds it."""
    split: Split
    hf: tuple[str, ...]
    """Hugging Face tensors, in the order they are merged."""
    shape: tuple[int, ...]
    """Merged over the tensor-parallel ranks."""
    is_copy: bool = False
    """The last stage's copy of a tied embedding: loaded, never exported."""


@dataclass(frozen=True)
class WeightMap:
    """All parameters of one model, and the arithmetic of their layouts."""

    parameters: tuple[Parameter, ...]
    num_groups: int
    """Key-value heads. Megatron stores queries group by group, each followed by its key and its value."""
    head_dim: int
    vocab_size: int
    tied: bool

    def merge(self, parameter: Parameter, tensors: list[Tensor]) -> Tensor:
        """Hugging Face tensors -> the whole Megatron parameter."""
        if parameter.split == "qkv":
            return torch.cat([self._groups(tensor) for tensor in tensors], 1).flatten(0, 1)
        if parameter.split == "vocabulary":
            padding = parameter.shape[0] - len(tensors[0])
            return torch.cat((tensors[0], tensors[0].new_zeros(padding, parameter.shape[1])))
        return torch.cat(tensors)

    def unmerge(self, parameter: Parameter, merged: Tensor) -> list[Tensor]:
        """Inverse of `merge`."""
        if parameter.split == "qkv":
            groups = self._groups(merged)
            sizes = [groups.shape[1] - 2 * self.head_dim, self.head_dim, self.head_dim]
            return [part.flatten(0, 1).contiguous() for part in torch.split(groups, sizes, 1)]
        if parameter.split == "gate_up":
            return list(merged.chunk(2))
        if parameter.split == "vocabulary":
            return [merged[: self.vocab_size]]
        return [merged]

    def _groups(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.num_groups, -1, *tensor.shape[1:])


def shard(parameter: Parameter, merged: Tensor, rank: int, size: int) -> Tensor:
    """The part of a merged parameter that tensor-parallel rank `rank` of `size` holds."""
    if parameter.split == "none":
        return merged
    if parameter.split == "columns":
        return merged.chunk(size, 1)[rank]
    if parameter.split == "gate_up":  # each rank holds its rows of the gate, then its rows of the up projection
        return torch.cat([part.chunk(size)[rank] for part in merged.chunk(2)])
    return merged.chunk(size)[rank]


def unshard(parameter: Parameter, shards: list[Tensor]) -> Tensor:
    """Inverse of `shard`, from the shards of all tensor-parallel ranks."""
    if parameter.split == "none" or len(shards) == 1:
        return shards[0]
    if parameter.split == "columns":
        return torch.cat(shards, 1)
    if parameter.split == "gate_up":
        gates, ups = zip(*(part.chunk(2) for part in shards), strict=True)
        return torch.cat((*gates, *ups))
    return torch.cat(shards)


def weight_map(hf: Any, *, tensor_parallel: int, pipeline_parallel: int, fused_norms: bool) -> WeightMap:
    """The parameters of the Hugging Face model `hf`.

    Args:
        fused_norms: Transformer Engine keeps a layer's norms inside the linear that follows them.
    """
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    per_stage = hf.num_hidden_layers // pipeline_parallel
    last = pipeline_parallel - 1
    vocabulary = (-(-hf.vocab_size // tensor_parallel) * tensor_parallel, hf.hidden_size)
    embedding = ("model.embed_tokens.weight",)
    parameters = [Parameter("embedding.word_embeddings.weight", 0, "vocabulary", embedding, vocabulary)]
    for layer in range(hf.num_hidden_layers):
        stage, local = divmod(layer, per_stage)
        parameters += _layer_parameters(hf, head_dim, layer, stage, local, fused_norms)
    parameters.append(
        Parameter("decoder.final_layernorm.weight", last, "none", ("model.norm.weight",), (hf.hidden_size,))
    )
    if not hf.tie_word_embeddings:
        parameters.append(Parameter("output_layer.weight", last, "vocabulary", ("lm_head.weight",), vocabulary))
    elif last > 0:
        parameters.append(Parameter("output_layer.weight", last, "vocabulary", embedding, vocabulary, is_copy=True))
    return WeightMap(tuple(parameters), hf.num_key_value_heads, head_dim, hf.vocab_size, hf.tie_word_embeddings)


def _layer_parameters(hf: Any, head_dim: int, layer: int, stage: int, local: int, fused_norms: bool) -> list[Parameter]:
    hidden, inner = hf.hidden_size, hf.intermediate_size
    queries = hf.num_attention_heads * head_dim
    qkv_rows = queries + 2 * hf.num_key_value_heads * head_dim
    attention_norm = "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fused_norms else "pre_mlp_layernorm.weight"

    def parameter(name: str, split: Split, hf_names: str, *shape: int) -> Parameter:
        names = tuple(f"model.layers.{layer}.{hf_name}" for hf_name in hf_names.split())
        return Parameter(f"decoder.layers.{local}.{name}", stage, split, names, shape)

    q, k, v = (f"self_attn.{letter}_proj" for letter in "qkv")
    parameters = [
        parameter(attention_norm, "none", "input_layernorm.weight", hidden),
        parameter("self_attention.linear_qkv.weight", "qkv", f"{q}.weight {k}.weight {v}.weight", qkv_rows, hidden),
        parameter("self_attention.linear_proj.weight", "columns", "self_attn.o_proj.weight", hidden, queries),
        parameter(mlp_norm, "none", "post_attention_layernorm.weight", hidden),
        parameter("mlp.linear_fc1.weight", "gate_up", "mlp.gate_proj.weight mlp.up_proj.weight", 2 * inner, hidden),
        parameter("mlp.linear_fc2.weight", "columns", "mlp.down_proj.weight", hidden, inner),
    ]
    if hf.model_type == "qwen2":
        parameters.append(parameter("self_attention.linear_qkv.bias", "qkv", f"{q}.bias {k}.bias {v}.bias", qkv_rows))
    if hf.model_type == "qwen3":
        parameters += [
            parameter("self_attention.q_layernorm.weight", "none", "self_attn.q_norm.weight", head_dim),
            parameter("self_attention.k_layernorm.weight", "none", "self_attn.k_norm.weight", head_dim),
        ]
    return parameters


class HuggingFaceReader:
    """Reads single tensors of a Hugging Face directory, sharded or not."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        index = directory / INDEX_FILE
        if index.exists():
            self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (directory / "model.safetensors").exists():
            with safe_open(directory / "model.safetensors", "pt") as file:
                self._files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise ValueError(f"no weights in {directory}: expected model.safetensors or {INDEX_FILE}")

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self._files if name.startswith(prefix))

    def read(self, name: str) -> Tensor:
        if name not in self._files:
            raise ValueError(f"{self._directory} has no tensor {name!r}: its config.json describes another model")
        with safe_open(self._directory / self._files[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


@torch.no_grad()
def load(model: torch.nn.Module, weights: WeightMap, directory: Path) -> None:
    """Fill this rank's parameters from a Hugging Face directory, converting to the parameters' type.

    Raises:
        ValueError: a tensor is missing or has another shape than the configuration says.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    own = dict(model.named_parameters())
    reader = HuggingFaceReader(directory)
    for parameter in weights.parameters:
        if parameter.stage != parallel_state.get_pipeline_model_parallel_rank():
            continue
        merged = weights.merge(parameter, [reader.read(name) for name in parameter.hf])
        if tuple(merged.shape) != parameter.shape:
            raise ValueError(
                f"{', '.join(parameter.hf)} in {directory}: merged shape {tuple(merged.shape)}, "
                f"but config.json says {parameter.shape}"
            )
        target = own.pop(parameter.name)
        target.copy_(shard(parameter, merged, rank, size))
        # Megatron marks split parameters where it initialises them, which it does not here. Without the mark the
        # gradient's norm counts one rank's part only.
        target.tensor_model_parallel = parameter.split != "none"  # type: ignore[attr-defined]
    assert not own, f"parameters that nothing was loaded into: {sorted(own)}"


@torch.no_grad()
def export(model: torch.nn.Module, weights: WeightMap) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor, whole, on every rank; collective. A tied `lm_head.weight` comes too, at the end.

    Tensors may be views of the parameters: use or copy one before asking for the next.
    """
    own = dict(model.named_parameters())
    like = next(iter(own.values()))
    head: Tensor | None = None
    for parameter in weights.parameters:
        if parameter.is_copy:
            continue
        merged = _merged_everywhere(parameter, own.get(parameter.name), like)
        for name, tensor in zip(parameter.hf, weights.unmerge(parameter, merged), strict=True):
            yield name, tensor
            head = tensor if name == "model.embed_tokens.weight" else head
    if weights.tied:
        assert head is not None
        yield "lm_head.weight", head


def _merged_everywhere(parameter: Parameter, local: Tensor | None, like: Tensor) -> Tensor:
    """Gather over tensor-parallel ranks where the parameter lives, then broadcast to the other pipeline stages."""
    merged: Tensor | None = None
    if parameter.stage == parallel_state.get_pipeline_model_parallel_rank():
        assert local is not None
        merged = _gather(parameter, local.detach())
    return from_stage(parameter.stage, merged, parameter.shape, like.dtype)


def _gather(parameter: Parameter, local: Tensor) -> Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or parameter.split == "none":
        return local
    shards = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shards, local.contiguous(), group=group)
    return unshard(parameter, shards)
