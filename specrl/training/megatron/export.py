"""The stream of whole Hugging Face tensors from Megatron's shards to every rank, which a refit loads into the engines.

Tensors travel in messages of a part of a layer. The pipeline stage that holds them broadcasts its shards to the other
stages, mostly over the network: so a rank receives there only what its own tensor-parallel rank holds. The
tensor-parallel ranks, which share a node, then gather the whole. Experts go the same way, with expert-parallel ranks in
place of tensor-parallel ones. Every engine gets whole tensors, because vLLM's loaders take those and cut out the
engine's own part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from specrl.models.buckets import buckets
from specrl.models.checks.headers import EMBEDDINGS, HEAD
from specrl.training.megatron.parallel import from_stage
from specrl.training.megatron.weights import Parameter, WeightMap, join


@dataclass(frozen=True)
class Part:
    """What one rank holds of a Hugging Face tensor; of experts, of the tensors with the same place on each rank."""

    names: tuple[str, ...]
    """The name of the tensor; of experts one name for each expert-parallel rank, whose tensor is whole there."""
    parameter: Parameter
    index: int
    shape: tuple[int, ...]
    """The shape of what one rank holds; of a vocabulary with the padding."""
    copies: int
    """The number of ranks that hold different parts: 1 where all of it is on every rank."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@torch.no_grad()
def export(model: torch.nn.Module, weights: WeightMap) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor, whole, on every rank; all ranks take part.

    A tied `lm_head.weight` comes right after the embeddings. Tensors may be views of the parameters: use or copy one
    before asking for the next. At most about one layer is in memory beside the parameters, or the embeddings where they
    are larger.
    """
    like = next(model.parameters())
    for message in messages(weights, like.element_size()):
        for name, tensor in _whole_tensors(weights, message, model, like):
            yield name, tensor
            if weights.tied and name == EMBEDDINGS:
                yield HEAD, tensor


def messages(weights: WeightMap, element_size: int) -> Iterator[list[Part]]:
    """Yield what is sent together: tensors of one layer, those first that every rank holds whole.

    Experts are apart from the rest of their layer, as other ranks share them.
    """
    parts = _parts(weights)
    for _, group in groupby(parts, key=lambda part: (part.parameter.stage, part.names[0].split(".")[:3])):
        layer = list(group)
        for is_expert in (False, True):
            own = [part for part in layer if (part.parameter.expert_rank is not None) == is_expert]
            for indices in buckets([part.numel * part.copies * element_size for part in own]):
                yield sorted((own[index] for index in indices), key=lambda part: part.copies > 1)


def _parts(weights: WeightMap) -> Iterator[Part]:
    experts: dict[tuple[int, str], list[Parameter]] = {}
    for parameter in weights.parameters:
        if parameter.expert_rank is not None:
            experts.setdefault((parameter.stage, parameter.name), []).append(parameter)
    for parameter in weights.parameters:
        if parameter.is_copy or parameter.expert_rank not in (None, 0):
            continue
        alike = experts.get((parameter.stage, parameter.name), [parameter])
        _, size = parameter.place
        copies = 1 if parameter.split == "none" else max(size, len(alike))
        for index, shape in enumerate(weights.part_shapes(parameter, size)):
            yield Part(tuple(other.hf[index] for other in alike), parameter, index, shape, copies)


def _whole_tensors(
    weights: WeightMap, message: list[Part], model: torch.nn.Module, like: Tensor
) -> Iterator[tuple[str, Tensor]]:
    stage = message[0].parameter.stage
    shards: list[Tensor] | None = None
    if stage == parallel_state.get_pipeline_model_parallel_rank():
        shards = _own_parts(weights, message, model)
        if parallel_state.get_pipeline_model_parallel_world_size() == 1 and message[-1].copies == 1:
            yield from ((part.names[0], shard) for part, shard in zip(message, shards, strict=True))
            return
    flat = from_stage(stage, _joined(shards), (sum(part.numel for part in message),), like.dtype)
    del shards
    whole = sum(part.numel for part in message if part.copies == 1)
    gathered = _gather(flat[whole:], message[-1])
    if whole < len(flat):
        flat = flat[:whole].clone()  # the rest is in `gathered`, and goes
    offset = 0
    for part in message:
        end = offset + part.numel
        if part.copies == 1:
            yield part.names[0], flat[offset:end].view(part.shape)
        else:
            held = gathered[:, offset - whole : end - whole].reshape(-1, *part.shape)
            yield from _named(weights, part, held)
        offset = end


def _named(weights: WeightMap, part: Part, held: Tensor) -> Iterator[tuple[str, Tensor]]:
    if part.parameter.expert_rank is None:
        yield part.names[0], join(weights, part.parameter, held)
    else:
        yield from zip(part.names, held, strict=True)


def _own_parts(weights: WeightMap, message: list[Part], model: torch.nn.Module) -> list[Tensor]:
    # An attribute is asked for, and not a parameter: that of a layer with adapters is their sum.
    parameters = dict.fromkeys(part.parameter for part in message)
    held = {
        parameter: weights.unmerge(parameter, attrgetter(parameter.name)(model).detach(), parameter.place[1])
        for parameter in parameters
    }
    return [held[part.parameter][part.index] for part in message]


def _joined(shards: list[Tensor] | None) -> Tensor | None:
    if shards is None:
        return None
    rows = [shard.reshape(-1) for shard in shards]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _gather(flat: Tensor, part: Part) -> Tensor:
    if not len(flat):
        return flat[None]
    gathered = flat.new_empty(part.copies * len(flat))
    # Newer versions of torch have another name for it, which older ones, such as 2.11, lack.
    dist.all_gather_into_tensor(gathered, flat, group=part.parameter.sharers)
    return gathered.view(part.copies, -1)
