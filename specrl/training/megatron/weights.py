"""The conversion of weights between Hugging Face tensors and Megatron's shards, both ways and bit for bit.

A `Parameter` names one Megatron parameter, the Hugging Face tensors that it consists of, and how tensor parallelism
splits it or which expert-parallel rank holds it. Their list follows from the model's `Family` row and is the same on
every rank, so that collectives match while weights stream (`export.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.utils.parametrize import register_parametrization

from specrl.config.training import LoraConfig
from specrl.models.checks import headers
from specrl.models.checks.headers import check_weights
from specrl.models.directory import EMBEDDINGS, FINAL_NORM, HEAD, read_model_config
from specrl.models.families import Family, Layout, expert_shape_of_model, family_of_model, head_dim
from specrl.models.hf_io import TensorReader
from specrl.training.lora import DOWN, UP, LowRankUpdate, initial
from specrl.training.pieces import Band, Piece

Split = Layout | Literal["none", "rows", "vocabulary"]
"""How tensor parallelism splits a parameter: by the layout in the family's row, not at all, by rows, or by those of a
vocabulary, which are padded."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of Megatron's model, whichever pipeline stage and expert-parallel rank holds it."""

    name: str
    """Megatron's name, which counts layers from 0 in each pipeline stage, and experts in each expert-parallel rank."""
    stage: int
    split: Split
    hf: tuple[str, ...]
    """The names of the Hugging Face tensors of which it consists, in the order in which they are merged."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of each of them."""
    expert_rank: int | None = None
    """The expert-parallel rank that holds it; None where all of them do. It is whole there: tensor parallelism does not
    split experts."""
    is_copy: bool = False
    """Whether it is the last stage's copy of a tied embedding, which is loaded but never exported."""

    @property
    def is_here(self) -> bool:
        is_stage = self.stage == parallel_state.get_pipeline_model_parallel_rank()
        return is_stage and self.expert_rank in (None, parallel_state.get_expert_model_parallel_rank())

    @property
    def place(self) -> tuple[int, int]:
        """This rank's index among the ranks over which tensor parallelism splits the parameter, and their number."""
        if self.expert_rank is not None:
            return 0, 1
        return (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size())

    @property
    def sharers(self) -> Any:
        """The process group of this stage's ranks that hold different parts of the parameter, or different experts."""
        if self.expert_rank is not None:
            return parallel_state.get_expert_model_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def replicas(self) -> Any:
        if self.expert_rank is not None:
            return parallel_state.get_expert_data_parallel_group()
        return parallel_state.get_data_parallel_group()

    def part_shapes(self, size: int) -> list[tuple[int, ...]]:
        """The shape of each tensor's part on one of `size` tensor-parallel ranks, with the vocabulary's padding."""
        if self.split == "none":
            return list(self.shapes)
        if self.split == "columns":
            return [(rows, columns // size) for rows, columns in self.shapes]
        return [(-(-rows // size), *rest) for rows, *rest in self.shapes]


@dataclass(frozen=True)
class WeightMap:
    """All parameters of one model, and the arithmetic of their layouts."""

    parameters: tuple[Parameter, ...]
    num_groups: int
    """The number of key-value heads. Megatron stores queries group by group, each followed by its key and value."""
    head_dim: int
    vocab_size: int
    tied: bool
    interleaved: bool = False
    """Whether Hugging Face rotates channels 2i and 2i + 1 of a head. Megatron rotates halves, and gets them so."""

    def merge(self, parameter: Parameter, tensors: Sequence[Tensor], size: int = 1) -> Tensor:
        """One of `size` tensor-parallel ranks' part of a parameter, given its parts of the tensors."""
        if parameter.split == "qkv":
            groups = self.num_groups // size
            tensors = self._reordered(tensors, halves=False)
            return torch.cat([tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors], 1).flatten(0, 1)
        if parameter.split == "vocabulary":
            merged = tensors[0].new_zeros(*parameter.part_shapes(size)[0])
            merged[: len(tensors[0])] = tensors[0]
            return merged
        return torch.cat(list(tensors))

    def unmerge(self, parameter: Parameter, merged: Tensor, size: int = 1) -> list[Tensor]:
        """A rank's part of each Hugging Face tensor: the inverse of `merge`; a vocabulary keeps its padding."""
        if parameter.split == "qkv":
            groups = merged.reshape(self.num_groups // size, -1, *merged.shape[1:])
            heights = [shape[0] // self.num_groups for shape in parameter.shapes]
            parts = [part.flatten(0, 1) for part in torch.split(groups, heights, 1)]
            return [part.contiguous() for part in self._reordered(parts, halves=True)]
        return list(merged.chunk(len(parameter.hf)))

    def _reordered(self, tensors: Sequence[Tensor], *, halves: bool) -> Sequence[Tensor]:
        """Interleaved queries and keys with their rotated channels in two `halves` of a head, or side by side again."""
        if not self.interleaved:
            return tensors
        width = self.head_dim // 2
        shape = (-1, 2, width) if halves else (-1, width, 2)
        queries, keys = (
            tensor.reshape(*shape, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape) for tensor in tensors[:2]
        )
        return [queries, keys, tensors[2]]


def part_of(parameter: Parameter, shape: Sequence[int], rank: int, size: int) -> tuple[int, int, int]:
    """A rank's part of one of a parameter's tensors: the split dimension, start and stop."""
    if parameter.split == "none":
        return 0, 0, shape[0]
    dim = 1 if parameter.split == "columns" else 0
    step = -(-shape[dim] // size)  # it may not divide a vocabulary: the last ranks' rows are padded
    return dim, min(rank * step, shape[dim]), min((rank + 1) * step, shape[dim])


def join(weights: WeightMap, parameter: Parameter, parts: Tensor) -> Tensor:
    """One of a parameter's Hugging Face tensors, whole, from each rank's part of it, [ranks, *part].

    A tensor split by rows is not copied if its parts are contiguous in memory.
    """
    if parameter.split == "columns":
        return parts.transpose(0, 1).flatten(1)
    whole = parts.flatten(0, 1)
    return whole[: weights.vocab_size] if parameter.split == "vocabulary" else whole


def weight_map(hf: Any, *, pipeline_parallel: int, expert_parallel: int, transformer_engine: bool) -> WeightMap:
    """The parameters of the model with transformers' configuration `hf`.

    Transformer Engine puts norms inside the linear layers after them, and all experts of a rank in one module.
    """
    family, experts = family_of_model(hf), expert_shape_of_model(hf)
    shapes = headers.tensor_shapes({**hf.to_dict(), "architectures": [family.architecture]})
    per_stage = hf.num_hidden_layers // pipeline_parallel
    last = pipeline_parallel - 1

    def outside(name: str, stage: int, split: Split, hf_name: str, *, is_copy: bool = False) -> Parameter:
        return Parameter(name, stage, split, (hf_name,), (shapes[hf_name],), is_copy=is_copy)

    parameters = [outside("embedding.word_embeddings.weight", 0, "vocabulary", EMBEDDINGS)]
    for layer in range(hf.num_hidden_layers):
        stage, local = divmod(layer, per_stage)
        place = _Place(layer, stage, local, transformer_engine, shapes)
        parameters += _layer_parameters(family, place)
        if experts is not None:
            parameters += _expert_parameters(family, experts.num_experts, expert_parallel, place)
    parameters.append(outside("decoder.final_layernorm.weight", last, "none", FINAL_NORM))
    if not hf.tie_word_embeddings:
        parameters.append(outside("output_layer.weight", last, "vocabulary", HEAD))
    elif last > 0:
        parameters.append(outside("output_layer.weight", last, "vocabulary", EMBEDDINGS, is_copy=True))
    return WeightMap(
        tuple(parameters),
        hf.num_key_value_heads,
        head_dim(hf),
        hf.vocab_size,
        hf.tie_word_embeddings,
        family.rotary_interleaved,
    )


@dataclass(frozen=True)
class _Place:
    layer: int
    stage: int
    local: int
    transformer_engine: bool
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each Hugging Face tensor, by its name."""

    def parameter(
        self, name: str, split: Split, hf_names: Sequence[str], *, expert_rank: int | None = None
    ) -> Parameter:
        names = tuple(f"model.layers.{self.layer}.{hf_name}" for hf_name in hf_names)
        shapes = tuple(self.shapes[hf_name] for hf_name in names)
        return Parameter(f"decoder.layers.{self.local}.{name}", self.stage, split, names, shapes, expert_rank)


def _layer_parameters(family: Family, place: _Place) -> list[Parameter]:
    """The parameters of a transformer layer, without those of a router and experts."""
    attention_norm, mlp_norm = "input_layernorm.weight", "pre_mlp_layernorm.weight"
    if place.transformer_engine:
        attention_norm = f"{family.attention[0].megatron}.layer_norm_weight"
        mlp_norm = mlp_norm if family.router else f"{family.mlp[0].megatron}.layer_norm_weight"
    norms = {attention_norm: "input_layernorm", mlp_norm: "post_attention_layernorm"}
    if family.qk_norm:
        norms |= {f"self_attention.{letter}_layernorm.weight": f"self_attn.{letter}_norm" for letter in "qk"}
    parameters = [place.parameter(name, "none", [f"{norm}.weight"]) for name, norm in norms.items()]
    for linear in family.attention if family.router else family.linears:
        weights = [f"{part}.weight" for part in linear.parts]
        parameters.append(place.parameter(f"{linear.megatron}.weight", linear.layout, weights))
        if linear.layout == "qkv" and family.qkv_bias:
            biases = [f"{part}.bias" for part in linear.parts]
            parameters.append(place.parameter(f"{linear.megatron}.bias", "qkv", biases))
    return parameters


def _expert_parameters(family: Family, num_experts: int, expert_parallel: int, place: _Place) -> list[Parameter]:
    assert family.router is not None
    parameters = [place.parameter(f"{family.router.megatron}.weight", "none", [f"{family.router.hf}.weight"])]
    for expert in range(num_experts):
        rank, local = divmod(expert, num_experts // expert_parallel)
        for linear in family.mlp:
            parent, _, own = linear.megatron.rpartition(".")
            name = f"{parent}.local_experts.{local}.{own}.weight"
            if place.transformer_engine:
                name = f"{linear.megatron}.weight{local}"
            weights = [f"{part.format(expert=expert)}.weight" for part in linear.parts]
            parameters.append(place.parameter(name, linear.layout, weights, expert_rank=rank))
    return parameters


@torch.no_grad()
def load(model: torch.nn.Module, weights: WeightMap, directory: Path) -> None:
    """Fill this rank's parameters from a Hugging Face directory, converting to the parameters' type (collective).

    Only the first data-parallel rank reads its part of each tensor, and sends it to the others. Raises ValueError on
    every rank unless the files hold exactly the model of `config.json`.
    """
    check_weights(directory, read_model_config(directory))
    own = dict(model.named_parameters())
    reader = TensorReader(directory)
    for parameter in (parameter for parameter in weights.parameters if parameter.is_here):
        target = own.pop(parameter.name)
        replicas = parameter.replicas
        if replicas.rank() == 0:
            target.copy_(_own_part(weights, parameter, reader))
        if replicas.size() > 1:
            dist.broadcast(target.data, dist.get_global_rank(replicas, 0), group=replicas)
        _mark(target, parameter)
    assert not own, f"parameters without loaded values: {sorted(own)}"


def _mark(target: torch.nn.Parameter, parameter: Parameter) -> None:
    # Megatron marks split parameters when it initialises them, which is skipped here. Without the mark the gradient
    # norm would count only one rank's part. Experts are marked with the ranks that share them.
    target.tensor_model_parallel = parameter.split != "none"  # type: ignore[attr-defined]
    target.allreduce = parameter.expert_rank is None  # type: ignore[attr-defined]


def _own_part(weights: WeightMap, parameter: Parameter, reader: TensorReader) -> Tensor:
    rank, size = parameter.place
    parts = []
    for name, shape in zip(parameter.hf, parameter.shapes, strict=True):
        dim, start, stop = part_of(parameter, shape, rank, size)
        parts.append(reader.read_slice(name, start, stop, dim=dim))
    return weights.merge(parameter, parts, size)


def add_adapters(model: torch.nn.Module, weights: WeightMap, config: LoraConfig, seed: int) -> WeightMap:
    """Freeze the loaded parameters, and add adapters to each linear layer, which alone are trained; return these."""
    model.requires_grad_(False)
    found = []
    for weight in weights.parameters:
        if weight.expert_rank is not None:
            raise ValueError("policy.lora: the model has experts, which have no adapters here; leave policy.lora out")
        if len(weight.shapes[0]) < 2 or weight.split in ("none", "vocabulary"):
            continue
        pairs = [_adapters(weight, index, shape, config) for index, shape in enumerate(weight.shapes)]
        found += [adapter for pair in pairs for adapter in pair]
        if weight.is_here:
            layer = model.get_submodule(weight.name.removesuffix(".weight"))
            like = layer.get_parameter("weight")
            down, up = zip(*[[_made(adapter, like, seed) for adapter in pair] for pair in pairs], strict=True)
            merge = partial(weights.merge, weight, size=weight.place[1])
            update = LowRankUpdate(down, up, config.scale, merge)
            register_parametrization(layer, "weight", update, unsafe=True)  # skips the pass that checks the shape
    if hasattr(model, "embedding"):
        # Recomputed layers get a gradient only if their input requires one.
        embedding = model.get_submodule("embedding")
        embedding.register_forward_hook(lambda _, __, hidden: hidden.requires_grad_(torch.is_grad_enabled()))
    return replace(weights, parameters=tuple(found))


def _adapters(weight: Parameter, index: int, shape: tuple[int, ...], config: LoraConfig) -> tuple[Parameter, Parameter]:
    name, module = weight.name.removesuffix("weight"), weight.hf[index].removesuffix("weight")
    splits: tuple[Split, Split] = ("columns", "none") if weight.split == "columns" else ("none", "rows")
    place = f"{name}parametrizations.weight.0"
    return (
        Parameter(f"{place}.down.{index}", weight.stage, splits[0], (module + DOWN,), ((config.rank, shape[1]),)),
        Parameter(f"{place}.up.{index}", weight.stage, splits[1], (module + UP,), ((shape[0], config.rank),)),
    )


def _made(adapter: Parameter, like: Tensor, seed: int) -> torch.nn.Parameter:
    """This rank's part of an adapter before training."""
    (shape,) = adapter.shapes
    dim, start, stop = part_of(adapter, shape, *adapter.place)
    part = initial(adapter.hf[0], shape, seed).narrow(dim, start, stop - start)
    made = torch.nn.Parameter(part.to(like, copy=True, memory_format=torch.contiguous_format))
    _mark(made, adapter)
    # Each tensor-parallel rank has a part of the gradient of a replicated adapter, as with norms.
    made.sequence_parallel = adapter.split == "none"  # type: ignore[attr-defined]
    return made


def tensor_shapes(weights: WeightMap) -> dict[str, tuple[int, ...]]:
    pairs = (zip(parameter.hf, parameter.shapes, strict=True) for parameter in weights.parameters)
    return dict(chain.from_iterable(pairs))


def bands(weights: WeightMap, parameter: Parameter, rank: int, size: int) -> list[Band]:
    """The rows of the parameter's Hugging Face tensors that form a tensor-parallel rank's matrix."""
    groups = weights.num_groups // size if parameter.split == "qkv" else 1
    found, first = list[Band](), 0
    for group in range(groups):
        for name, shape in zip(parameter.hf, parameter.shapes, strict=True):
            dim, start, stop = part_of(parameter, shape, rank, size)
            rows, columns = (0, shape[0]), (start, stop)
            if dim == 0:
                height = (stop - start) // groups
                rows, columns = (start + group * height, start + (group + 1) * height), (0, prod(shape[1:]))
            found.append(Band(first, Piece(name, rows, columns)))
            first += rows[1] - rows[0]
    return found
