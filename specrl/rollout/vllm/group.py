"""The ranks of one tensor-parallel engine: what each of them holds of a tensor, and how they decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def is_first() -> bool:
    """Whether this is the first rank of its engine."""
    return int(_group().rank_in_group) == 0


def agreed(*values: float) -> list[float]:
    """The first rank's values on all ranks of this engine, which must decide alike (collective)."""
    group = _group()
    if group.world_size == 1:
        return list(values)
    shared = torch.tensor(values, dtype=torch.float64)
    torch.distributed.broadcast(shared, src=group.ranks[0], group=group.cpu_group)
    found: list[float] = shared.tolist()
    return found


def of_first(value: Any) -> Any:
    """The first rank's value on all ranks of this engine (collective)."""
    group = _group()
    if group.world_size == 1:
        return value
    shared = [value]
    torch.distributed.broadcast_object_list(shared, src=group.ranks[0], group=group.cpu_group)
    return shared[0]


def true_on_any(flag: bool) -> bool:
    """Whether `flag` is true on any rank of this engine (collective)."""
    group = _group()
    if group.world_size == 1:
        return flag
    shared = torch.tensor([int(flag)])
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(shared)


def own_parts(layer: nn.Module, kind: str, parts: Sequence[Tensor]) -> list[Tensor]:
    """Cut this rank's parts out of the tensors that a layer fuses, which it holds stacked in this order.

    Of queries, keys and values, keys and values are repeated where there are more ranks than heads of them.

    Args:
        kind: The name of the parameter: `weight`, `bias` or another one.
    """
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    place: Any = layer
    if isinstance(layer, VocabParallelEmbedding):
        first, end = place.shard_indices.org_vocab_start_index, place.shard_indices.org_vocab_end_index
        return [part[int(first) : int(end)] for part in parts]
    if isinstance(layer, RowParallelLinear) and kind != "bias":
        return [part.chunk(int(place.tp_size), 1)[int(place.tp_rank)] for part in parts]
    if isinstance(layer, ColumnParallelLinear):
        replicas = [1] + [getattr(layer, "num_kv_head_replicas", 1)] * (len(parts) - 1)
        size, rank, owned = int(place.tp_size), int(place.tp_rank), zip(parts, replicas, strict=True)
        return [part.chunk(size // times)[rank // times] for part, times in owned]
    return list(parts)


def _group() -> Any:
    from vllm.distributed import parallel_state

    return parallel_state.get_tp_group()
