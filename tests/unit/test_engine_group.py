"""Which part of a whole tensor a rank of a tensor-parallel engine holds; the layers are empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specrl.rollout.vllm.weights.comparison import own_parts


def layer(kind: str, **attributes: Any) -> Any:
    from vllm.model_executor.layers import linear

    found = object.__new__(getattr(linear, kind))
    found.__dict__.update(attributes)
    return found


@pytest.mark.parametrize(
    ("rank", "queries", "keys"), [(0, [0, 1], [0, 1]), (1, [2, 3], [0, 1]), (2, [4, 5], [2, 3]), (3, [6, 7], [2, 3])]
)
def test_ranks_share_a_head_of_keys_where_there_are_more_ranks_than_heads(
    rank: int, queries: list[int], keys: list[int]
) -> None:
    attention = layer("QKVParallelLinear", tp_size=4, tp_rank=rank, num_kv_head_replicas=2)
    q, k = torch.arange(8.0)[:, None].expand(8, 3), torch.arange(4.0)[:, None].expand(4, 3)
    part = torch.cat(own_parts(attention, "weight", [q, k, -k]))
    assert part[:, 0].tolist() == [*queries, *keys, *(-key for key in keys)]
    bias = torch.cat(own_parts(attention, "bias", [q[:, 0], k[:, 0], -k[:, 0]]))
    assert torch.equal(bias, part[:, 0])


def test_a_layer_split_by_its_inputs_has_the_whole_bias() -> None:
    down = layer("RowParallelLinear", tp_size=2, tp_rank=1)
    weight = torch.arange(8.0).view(2, 4)
    assert torch.equal(own_parts(down, "weight", [weight])[0], weight[:, 2:])
    assert torch.equal(own_parts(down, "bias", [weight[:, 0]])[0], weight[:, 0])


def test_every_rank_holds_what_is_not_split() -> None:
    weight = torch.ones(4, 4)
    assert torch.equal(own_parts(layer("ReplicatedLinear", tp_size=2, tp_rank=1), "weight", [weight])[0], weight)
    assert torch.equal(own_parts(torch.nn.LayerNorm(4), "weight", [weight[0]])[0], weight[0])
