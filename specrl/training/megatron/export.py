"""The stream of whole Hugging Face tensors from Megatron's shards to every rank, which a refit loads into the engines.

Tensors travel in messages of a part of a layer. The pipeline stage that holds them broadcasts its shards to the other
stages, mostly over the network: so a rank receives there only what its own tensor-parallel rank holds. The
tensor-parallel ranks, which share a node, then gather the whole. An expert, which is whole on one expert-parallel rank,
goes from there to the other stages, and in each of them to the other expert-parallel ranks. Every engine gets whole
tensors, because vLLM's loaders take those and cut out the engine's own part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import specrl.training.megatron.cpu_shim  # noqa: F401  (must precede megatron)

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from specrl.models.buckets import buckets
from specrl.training.megatron.parallel import from_expert_rank, from_stage
from specrl.training.megatron.weights import EMBEDDINGS, HEAD, Parameter, WeightMap, join


@dataclass(frozen=True)
class Part:
    """What each tensor-parallel rank holds of one Hugging Face tensor."""

    name: str
    """The name of the tensor."""
    parameter: Parameter
    """The parameter that it is a part of."""
    index: int
    """Its place among the tensors of that parameter."""
    shape: tuple[int, ...]
    """The shape of what one rank holds; of a vocabulary with the padding."""
    copies: int
    """The number of ranks that hold different parts of it: 1 where it is whole on every rank."""

    @property
    def numel(self) -> int:
        """The number of elements that one rank holds."""
        return math.prod(self.shape)


@torch.no_grad()
def export(model: torch.nn.Module, weights: WeightMap) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor, whole, on every rank; all ranks take part.

    A tied `lm_head.weight` comes right after the embeddings. Tensors may be views of the parameters: use or copy one
    before asking for the next. At most about one layer is in memory beside the parameters, or the embeddings where they
    are larger.
    """
    own = dict(model.named_parameters())
    like = next(iter(own.values()))
    for message in messages(weights, like.element_size()):
        for name, tensor in _whole_tensors(weights, message, own, like):
            yield name, tensor
            if weights.tied and name == EMBEDDINGS:
                yield HEAD, tensor


def messages(weights: WeightMap, element_size: int) -> Iterator[list[Part]]:
    """Yield what is sent together: tensors of one layer, those first that every rank holds whole.

    Experts are sent with those of the same expert-parallel rank.

    Args:
        element_size: The bytes of one element.
    """
    parts = [part for parameter in weights.parameters if not parameter.is_copy for part in _parts(weights, parameter)]
    for _, group in groupby(parts, key=_sender):
        layer = list(group)
        for indices in buckets([part.numel * part.copies * element_size for part in layer]):
            yield sorted((layer[index] for index in indices), key=lambda part: part.copies > 1)


def _sender(part: Part) -> tuple[object, ...]:
    """Return what the parts of a message have in common: the layer, and who holds it."""
    return part.parameter.stage, part.name.split(".")[:3], part.parameter.expert_rank


def _parts(weights: WeightMap, parameter: Parameter) -> list[Part]:
    _, size = parameter.place
    shapes = weights.part_shapes(parameter, size)
    copies = 1 if parameter.split == "none" else size
    return [
        Part(name, parameter, index, shape, copies)
        for index, (name, shape) in enumerate(zip(parameter.hf, shapes, strict=True))
    ]


def _whole_tensors(
    weights: WeightMap, message: list[Part], own: Mapping[str, Tensor], like: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one message (collective)."""
    shards: list[Tensor] | None = None
    if message[0].parameter.is_here:
        shards = _own_parts(weights, message, own)
        if _is_everywhere(message):
            yield from ((part.name, shard) for part, shard in zip(message, shards, strict=True))
            return
    flat = _from_sender(message, _joined(shards), like.dtype)
    del shards
    whole = sum(part.numel for part in message if part.copies == 1)
    gathered = _gather(flat[whole:])
    if whole < len(flat):
        flat = flat[:whole].clone()  # the rest is in `gathered`, and goes
    offset = 0
    for part in message:
        end = offset + part.numel
        if part.copies == 1:
            yield part.name, flat[offset:end].view(part.shape)
        else:
            held = gathered[:, offset - whole : end - whole].reshape(-1, *part.shape)
            yield part.name, join(weights, part.parameter, held)
        offset = end


def _is_everywhere(message: list[Part]) -> bool:
    """Whether every rank holds all tensors of a message whole."""
    has_one_stage = parallel_state.get_pipeline_model_parallel_world_size() == 1
    is_shared = message[0].parameter.expert_rank is None or parallel_state.get_expert_model_parallel_world_size() == 1
    return has_one_stage and is_shared and message[-1].copies == 1


def _from_sender(message: list[Part], flat: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a message, which one stage and, of experts, one expert-parallel rank holds, on the others (collective)."""
    stage, expert_rank = message[0].parameter.stage, message[0].parameter.expert_rank
    shape = (sum(part.numel for part in message),)
    if expert_rank is None:
        return from_stage(stage, flat, shape, dtype)
    if expert_rank == parallel_state.get_expert_model_parallel_rank():
        flat = from_stage(stage, flat, shape, dtype)
    return from_expert_rank(expert_rank, flat, shape, dtype)


def _own_parts(weights: WeightMap, message: list[Part], own: Mapping[str, Tensor]) -> list[Tensor]:
    """Return what this rank holds of each tensor of a message."""
    parameters = dict.fromkeys(part.parameter for part in message)
    held = {
        parameter: weights.unmerge(parameter, own[parameter.name].detach(), parameter.place[1])
        for parameter in parameters
    }
    return [held[part.parameter][part.index] for part in message]


def _joined(shards: list[Tensor] | None) -> Tensor | None:
    """Return the tensors behind each other in one dimension; a single one is not copied."""
    if shards is None:
        return None
    rows = [shard.reshape(-1) for shard in shards]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _gather(flat: Tensor) -> Tensor:
    """Return what all tensor-parallel ranks hold, [ranks, elements] (collective)."""
    group = parallel_state.get_tensor_model_parallel_group()
    if not len(flat):
        return flat[None]
    gathered = flat.new_empty(group.size() * len(flat))
    dist.all_gather_single(gathered, flat, group=group)
    return gathered.view(group.size(), -1)
