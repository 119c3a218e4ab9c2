"""The stream of whole Hugging Face tensors from Megatron's shards to every rank, which a refit loads into the engines.

The pipeline stage that holds a tensor broadcasts its shards to the other stages, mostly over the network, so each rank
receives only the shard of its own tensor-parallel rank. The tensor-parallel ranks, which share a node, then gather the
whole. Experts travel likewise, with expert-parallel ranks in place of tensor-parallel ones. Every engine gets whole
tensors, because vLLM's loaders expect them and cut out the engine's own part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from specrl.models.directory import EMBEDDINGS, HEAD
from specrl.training.megatron.parallel import from_stage
from specrl.training.megatron.weights import Parameter, WeightMap, join


@torch.no_grad()
def export(model: torch.nn.Module, weights: WeightMap) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor, whole, on every rank; all ranks take part.

    A tied `lm_head.weight` comes right after the embeddings. Tensors may be views of the parameters: use or copy one
    before requesting the next. Besides the parameters, memory holds at most about one layer, or the embeddings if they
    are larger.
    """
    own_stage, dtype = parallel_state.get_pipeline_model_parallel_rank(), next(model.parameters()).dtype
    for alike in _by_place(weights):
        parameter = alike[0]
        _, size = parameter.place
        shapes = parameter.part_shapes(size)
        held: Sequence[Tensor | None] = [None] * len(shapes)
        if parameter.stage == own_stage:
            # The attribute and not the parameter: for a layer with adapters it is the merged weight.
            held = weights.unmerge(parameter, attrgetter(parameter.name)(model).detach(), size)
        for index, (part, shape) in enumerate(zip(held, shapes, strict=True)):
            shard = from_stage(parameter.stage, part, shape, dtype)
            name = parameter.hf[index]
            if len(alike) > 1:
                yield from zip([other.hf[index] for other in alike], _gather(parameter, shard, len(alike)), strict=True)
            elif size == 1 or parameter.split == "none":
                yield name, shard
            else:
                yield name, (shard := join(weights, parameter, _gather(parameter, shard, size)))
            if weights.tied and name == EMBEDDINGS:
                yield HEAD, shard


def _by_place(weights: WeightMap) -> list[list[Parameter]]:
    """The parameters to send, in order; experts at the same place on each expert-parallel rank are grouped."""
    found: dict[tuple[int, str], list[Parameter]] = {}
    for parameter in weights.parameters:
        if not parameter.is_copy:
            found.setdefault((parameter.stage, parameter.name), []).append(parameter)
    return list(found.values())


def _gather(parameter: Parameter, shard: Tensor, count: int) -> Tensor:
    gathered = shard.new_empty(count * shard.numel())
    # Newer versions of torch use another name, which older ones, such as 2.11, lack.
    dist.all_gather_into_tensor(gathered, shard.reshape(-1), group=parameter.sharers)
    return gathered.view(count, *shard.shape)
