"""Attention of the drafter's training: packed rows, windows and own keys, against one softmax over all keys."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from specrl.training.drafter import attention
from specrl.training.drafter.attention import Spans, attend

CPU = torch.device("cpu")
SPANS = Spans((0, 3, 4, 9), (0, 7, 8, 13), CPU)
"""Rows of 3, 1 and 5 queries that see 7, 1 and 5 keys at most."""
HEADS, KV_HEADS, WIDTH = 6, 2, 8


def inputs(own: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(9, HEADS), (13, KV_HEADS), (13, KV_HEADS), *[(9, KV_HEADS)] * 2 * own]
    return [torch.randn(*shape, WIDTH).requires_grad_() for shape in shapes]


def literal(q: Tensor, k: Tensor, v: Tensor, window: int | None, own: list[Tensor]) -> Tensor:
    """Query by query and head by head, one softmax over all that it sees."""
    rows = []
    for (first, last), (start, stop) in zip(pairwise(SPANS.queries), pairwise(SPANS.keys), strict=True):
        for place in range(first, last):
            end = stop - (last - 1 - place)
            seen = slice(start if window is None else max(start, end - window), end)
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                mine = [each[place, group][None] for each in own]
                keys = torch.cat([k[seen, group], *mine[: len(mine) // 2]])
                values = torch.cat([v[seen, group], *mine[len(mine) // 2 :]])
                heads.append((keys @ q[place, head]).softmax(0) @ values)
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def compare(window: int | None, own: int) -> None:
    tensors = inputs(own)
    weights = torch.randn(9, HEADS, WIDTH)
    expected = literal(*tensors[:3], window, tensors[3:])
    grads = torch.autograd.grad((expected * weights).sum(), tensors)
    found = attend(*tensors[:3], SPANS, window=window, own_keys=tensors[3 : 3 + own], own_values=tensors[3 + own :])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), tensors), grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [1 << 26, 60, 1])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("own", [0, 1, 4])
def test_own_keys_are_merged_into_the_context_exactly(
    own: int, window: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: a backward pass of the context with its own log-sum-exp, and not that over all keys."""
    monkeypatch.setattr(attention, "MAX_SCORES", most)
    compare(window, own)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("own", [0, 4])
def test_gpus_are_asked_for_the_same(own: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operations of flash attention, with what their kernels compute in the place of these."""
    monkeypatch.setattr(attention, "_kernel_for", lambda q: attention._Flash)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", flash_forward, "CPU")
        library.impl("_flash_attention_backward", flash_backward, "CPU")
        compare(window, own)


def spans_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Spans, int | None]:
    queries, keys, most_queries, most_keys, dropout, causal = arguments[:6]
    spans = Spans(tuple(queries.tolist()), tuple(keys.tolist()), CPU)
    left, right = options["window_size_left"], options["window_size_right"]
    assert (queries.dtype, keys.dtype, dropout, right) == (torch.int32, torch.int32, 0.0, 0)
    assert (most_queries, most_keys) == spans.longest and options["scale"] == 1.0
    assert causal == (left == -1)
    return spans, None if left == -1 else left + 1


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    out, lse = attention._Plain.forward(q, k, v, *spans_of(arguments, options))
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros(2), torch.zeros(0)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, ...]:
    assert grad.is_contiguous() and lse.is_contiguous() and lse.shape == (HEADS, len(q))
    return attention._Plain.backward(grad, q, k, v, out, lse, *spans_of(arguments, options))
