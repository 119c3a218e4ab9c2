"""Weights between Hugging Face names and Megatron's shards, both ways, tensor by tensor, bit by bit.

A `Parameter` names one Megatron parameter, the Hugging Face tensors that it is made of, and how tensor parallelism
splits it. The list of them follows from the model's `Family` row and is the same on every rank, so that collectives
match while weights stream (`export.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import specrl.training.megatron.cpu_shim  # noqa: F401  (must precede megatron)

# isort: split
import torch
from megatron.core import parallel_state
from torch import Tensor

from specrl.models.families import Family, Layout, family_of_model, head_dim
from specrl.models.hf_io import TensorReader

Split = Layout | Literal["none", "vocabulary"]
"""How tensor parallelism splits a parameter: by the layout in the family's row, not at all, or by vocabulary rows."""
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Parameter:
    """One parameter of Megatron's model, on whichever pipeline stage holds it."""

    name: str
    """Megatron's name, which counts layers from 0 in each pipeline stage."""
    stage: int
    """The pipeline stage that holds it."""
    split: Split
    hf: tuple[str, ...]
    """The names of the Hugging Face tensors that it is made of, in the order in which they are merged."""
    shape: tuple[int, ...]
    """Its shape when merged over the tensor-parallel ranks."""
    is_copy: bool = False
    """Whether it is the last stage's copy of a tied embedding, which is loaded but never exported."""


@dataclass(frozen=True)
class WeightMap:
    """All parameters of one model, and the arithmetic of their layouts."""

    parameters: tuple[Parameter, ...]
    num_groups: int
    """The number of key-value heads. Megatron stores queries group by group, each followed by its key and value."""
    head_dim: int
    vocab_size: int
    tied: bool
    """Whether the output layer is the embeddings' matrix."""

    def shape_on_disk(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of the parameter's Hugging Face tensors stacked below each other."""
        return (self.vocab_size, *parameter.shape[1:]) if parameter.split == "vocabulary" else parameter.shape

    def merge(self, parameter: Parameter, tensors: Sequence[Tensor], size: int = 1) -> Tensor:
        """Return what one tensor-parallel rank holds of a parameter, made of its parts of the Hugging Face tensors.

        Args:
            tensors: The rank's part of each tensor, as `part_of` has it; whole tensors where `size` is 1.
            size: The number of tensor-parallel ranks.
        """
        if parameter.split == "qkv":
            groups = self.num_groups // size
            return torch.cat([tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors], 1).flatten(0, 1)
        if parameter.split == "vocabulary":
            padding = parameter.shape[0] // size - len(tensors[0])
            return torch.cat((tensors[0], tensors[0].new_zeros(padding, parameter.shape[1])))
        return torch.cat(list(tensors))

    def unmerge(self, parameter: Parameter, merged: Tensor, size: int = 1) -> list[Tensor]:
        """Return a rank's part of each Hugging Face tensor, given what it holds of a parameter: the inverse of `merge`.

        A part of a vocabulary keeps its padding.

        Args:
            size: The number of tensor-parallel ranks.
        """
        if parameter.split == "qkv":
            groups = merged.reshape(self.num_groups // size, -1, *merged.shape[1:])
            return [part.flatten(0, 1).contiguous() for part in torch.split(groups, self._group_rows(parameter), 1)]
        return list(merged.chunk(len(parameter.hf)))

    def part_shapes(self, parameter: Parameter, size: int) -> list[tuple[int, ...]]:
        """Return the shapes of what `unmerge` returns for a rank of `size` tensor-parallel ranks."""
        rows, rest = parameter.shape[0], parameter.shape[1:]
        if parameter.split == "none":
            return [parameter.shape]
        if parameter.split == "columns":
            return [(rows, rest[0] // size)]
        if parameter.split == "qkv":
            return [(self.num_groups // size * height, *rest) for height in self._group_rows(parameter)]
        return [(rows // len(parameter.hf) // size, *rest)] * len(parameter.hf)

    def _group_rows(self, parameter: Parameter) -> list[int]:
        """Return the numbers of rows of queries, key and value in one key-value group."""
        return [parameter.shape[0] // self.num_groups - 2 * self.head_dim, self.head_dim, self.head_dim]


def part_of(parameter: Parameter, shape: Sequence[int], rank: int, size: int) -> tuple[int, int, int]:
    """Return the part of one of a parameter's Hugging Face tensors that a tensor-parallel rank holds.

    Args:
        shape: The shape of that tensor on disk.
        rank: The tensor-parallel rank, out of `size` of them.

    Returns:
        The dimension that is split, and the first index and the one behind the last along it.
    """
    if parameter.split == "none":
        return 0, 0, shape[0]
    dim = 1 if parameter.split == "columns" else 0
    whole = parameter.shape[0] if parameter.split == "vocabulary" else shape[dim]  # the vocabulary's rows are padded
    step = whole // size
    return dim, min(rank * step, shape[dim]), min((rank + 1) * step, shape[dim])


def join(weights: WeightMap, parameter: Parameter, parts: Tensor) -> Tensor:
    """Return one of a parameter's Hugging Face tensors, whole.

    Args:
        parts: What each tensor-parallel rank holds of it, [ranks, *part]. What is split by rows is not copied where
            these parts lie behind each other in memory.
    """
    if parameter.split == "columns":
        return parts.transpose(0, 1).flatten(1)
    whole = parts.flatten(0, 1)
    return whole[: weights.vocab_size] if parameter.split == "vocabulary" else whole


def weight_map(hf: Any, *, tensor_parallel: int, pipeline_parallel: int, fused_norms: bool) -> WeightMap:
    """Return the parameters of the model with transformers' configuration `hf`.

    Args:
        fused_norms: Whether a layer's norms lie inside the linear layers that follow them, as Transformer Engine has
            them.
    """
    per_stage = hf.num_hidden_layers // pipeline_parallel
    last = pipeline_parallel - 1
    vocabulary = (-(-hf.vocab_size // tensor_parallel) * tensor_parallel, hf.hidden_size)
    parameters = [Parameter("embedding.word_embeddings.weight", 0, "vocabulary", (EMBEDDINGS,), vocabulary)]
    for layer in range(hf.num_hidden_layers):
        stage, local = divmod(layer, per_stage)
        parameters += _layer_parameters(hf, family_of_model(hf), layer, stage, local, fused_norms)
    parameters.append(
        Parameter("decoder.final_layernorm.weight", last, "none", ("model.norm.weight",), (hf.hidden_size,))
    )
    if not hf.tie_word_embeddings:
        parameters.append(Parameter("output_layer.weight", last, "vocabulary", (HEAD,), vocabulary))
    elif last > 0:
        parameters.append(Parameter("output_layer.weight", last, "vocabulary", (EMBEDDINGS,), vocabulary, is_copy=True))
    return WeightMap(tuple(parameters), hf.num_key_value_heads, head_dim(hf), hf.vocab_size, hf.tie_word_embeddings)


def _layer_parameters(
    hf: Any, family: Family, layer: int, stage: int, local: int, fused_norms: bool
) -> list[Parameter]:
    hidden, inner = hf.hidden_size, hf.intermediate_size
    queries = hf.num_attention_heads * head_dim(hf)
    qkv_rows = queries + 2 * hf.num_key_value_heads * head_dim(hf)
    attention_norm = f"{family.attention[0].megatron}.layer_norm_weight" if fused_norms else "input_layernorm.weight"
    mlp_norm = f"{family.mlp[0].megatron}.layer_norm_weight" if fused_norms else "pre_mlp_layernorm.weight"

    def parameter(name: str, split: Split, hf_names: Sequence[str], *shape: int) -> Parameter:
        names = tuple(f"model.layers.{layer}.{hf_name}" for hf_name in hf_names)
        return Parameter(f"decoder.layers.{local}.{name}", stage, split, names, shape)

    parameters = [
        parameter(attention_norm, "none", ["input_layernorm.weight"], hidden),
        parameter(mlp_norm, "none", ["post_attention_layernorm.weight"], hidden),
    ]
    shapes = {
        linear: (hidden, queries) if linear.layout == "columns" else (qkv_rows, hidden) for linear in family.attention
    }
    shapes |= {linear: (hidden, inner) if linear.layout == "columns" else (2 * inner, hidden) for linear in family.mlp}
    for linear, shape in shapes.items():
        weights = [f"{part}.weight" for part in linear.parts]
        parameters.append(parameter(f"{linear.megatron}.weight", linear.layout, weights, *shape))
        if linear.layout == "qkv" and family.qkv_bias:
            biases = [f"{part}.bias" for part in linear.parts]
            parameters.append(parameter(f"{linear.megatron}.bias", "qkv", biases, qkv_rows))
    if family.qk_norm:
        parameters += [
            parameter(
                f"self_attention.{letter}_layernorm.weight", "none", [f"self_attn.{letter}_norm.weight"], head_dim(hf)
            )
            for letter in "qk"
        ]
    return parameters


@torch.no_grad()
def load(model: torch.nn.Module, weights: WeightMap, directory: Path) -> None:
    """Fill this rank's parameters from a Hugging Face directory, converting to the parameters' type.

    Of every tensor only the part is read that this rank holds.

    Raises:
        ValueError: A tensor is missing, or has another shape than `config.json` says.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    own = dict(model.named_parameters())
    reader = TensorReader(directory)
    for parameter in weights.parameters:
        if parameter.stage != parallel_state.get_pipeline_model_parallel_rank():
            continue
        _check_shape(weights, parameter, reader, directory)
        parts = []
        for name in parameter.hf:
            dim, start, stop = part_of(parameter, reader.shape(name), rank, size)
            parts.append(reader.read_slice(name, start, stop, dim=dim))
        target = own.pop(parameter.name)
        target.copy_(weights.merge(parameter, parts, size))
        # Megatron marks split parameters where it initialises them, which it does not here. Without the mark the
        # gradient's norm counts one rank's part only.
        target.tensor_model_parallel = parameter.split != "none"  # type: ignore[attr-defined]
    assert not own, f"parameters that nothing was loaded into: {sorted(own)}"


def _check_shape(weights: WeightMap, parameter: Parameter, reader: TensorReader, directory: Path) -> None:
    shapes = [reader.shape(name) for name in parameter.hf]
    found, expected = (sum(shape[0] for shape in shapes), *shapes[0][1:]), weights.shape_on_disk(parameter)
    if found != expected:
        raise ValueError(
            f"{', '.join(parameter.hf)} in {directory}: merged shape {found}, but config.json says {expected}"
        )
