"""What each rank of a tensor-parallel engine holds of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


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
