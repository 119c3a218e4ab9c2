"""Attention over flat rows, on CPUs and as GPUs do it, against sequences that each have a prompt of their own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from specrl.training.batches import MicroBatch, TokenSequence, pack, rows_of
from specrl.training.megatron.attention import PackedAttention, RowLayout
from tests.peak_memory import peak_bytes

WIDTH = 8


def row() -> MicroBatch:
    """Prompts with three, one and two responses, one of them empty, and a few tokens that fill up the row."""
    sequences = []
    for prompt, responses in ((7, (4, 2, 5)), (5, (6,)), (3, (0, 3))):
        for length in responses:
            index = len(sequences)
            sequences.append(TokenSequence.of([prompt] * prompt, [index] * length, index))
    [batch] = pack(sequences, 64, 16)
    assert batch.num_shared == 2 * 7 + 3 and len(batch.tokens) > batch.num_real
    return batch


def inputs(tokens: int, heads: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(tokens, 1, count, WIDTH) for count in (heads, groups, groups)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def one_by_one(batch: MicroBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The textbook's attention of each sequence; of a shared prompt's tokens the last one's result stays."""
    heads, groups = query.shape[2], key.shape[2]
    found = query.new_zeros(len(query), heads * WIDTH)
    for places, length in zip(batch.places(), batch.lengths.tolist(), strict=True):
        own = places[:length]
        q, k, v = (part[own, 0] for part in (query, key, value))
        k, v = (part.repeat_interleave(heads // groups, 1) for part in (k, v))
        scores = torch.einsum("shw,thw->hst", q, k) / WIDTH**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        context = torch.einsum("hst,thw->shw", scores.softmax(-1), v).flatten(1)
        found = found.index_copy(0, own, context)
    return found


def assert_same(batch: MicroBatch, attention: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    """Outputs and gradients agree; the textbook computes in float64."""
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = one_by_one(batch, *doubles)
    found = attention(*tensors, batch.segments)[: batch.num_real, 0]
    expected = expected[: batch.num_real]
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    tolerance = 3e-2 if tensors[0].dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    for mine, reference in zip(tensors, doubles, strict=True):
        assert mine.grad is not None and reference.grad is not None
        scale = float(reference.grad.abs().max())
        torch.testing.assert_close(mine.grad.double() / scale, reference.grad / scale, atol=tolerance, rtol=0)


def variable_length(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> Tensor:
    """What a variable-length kernel computes with a causal mask that is aligned at the bottom right."""
    found = []
    queries, keys = (pairwise(ends.tolist()) for ends in layout.ends)
    assert layout.most_queries <= layout.longest
    for (start, stop), (first, last) in zip(queries, keys, strict=True):
        assert stop - start <= layout.most_queries and last - first <= layout.longest
        own = [
            part.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
            for part in (k[first:last], v[first:last])
        ]
        scores = q[start:stop].transpose(0, 1) @ own[0].mT / WIDTH**0.5
        mask = torch.ones(stop - start, last - first).triu(1 + last - first - (stop - start)).bool()
        found.append((scores.masked_fill(mask, float("-inf")).softmax(-1) @ own[1]).transpose(0, 1))
    return torch.cat(found).flatten(1)


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(variable_length, torch.float32), (None, torch.float32), (None, torch.bfloat16)]
)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
def test_attention_over_a_flat_row(
    heads: int, groups: int, kernel: Callable[..., Tensor] | None, dtype: torch.dtype
) -> None:
    batch = row()
    assert_same(batch, PackedAttention(None, 1, kernel), inputs(len(batch.tokens), heads, groups, dtype))


def test_every_layer_of_a_pass_hands_the_kernel_the_same_lengths() -> None:
    """Transformer Engine chooses its backend anew where they differ: once for a micro-batch, and not in every layer."""
    lengths = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> Tensor:
        lengths.append((layout.most_queries, layout.longest, *(ends.data_ptr() for ends in layout.ends)))
        return variable_length(q, k, v, layout)

    batch = row()
    tensors = inputs(len(batch.tokens), 6, 2, torch.float32)
    for layer in range(1, 5):
        PackedAttention(None, layer, kernel)(*tensors, batch.segments.clone())
    assert len(lengths) == 4 and len(set(lengths)) == 1


def test_a_scale_of_the_softmax_is_one_of_queries_and_keys() -> None:
    batch = row()
    q, k, v = inputs(len(batch.tokens), 6, 2, torch.float32)
    scaled = PackedAttention(None, 1, softmax_scale=1.2**2 * WIDTH**-0.5)(q, k, v, batch.segments)
    torch.testing.assert_close(scaled, PackedAttention(None, 1)(1.2 * q, 1.2 * k, v, batch.segments))


def test_attention_without_a_gradient_is_the_same_and_bounds_its_scores() -> None:
    heads, groups = 6, 2
    sequences = [TokenSequence.of([9] * 50, [index] * 40, index) for index in range(2)]
    [batch] = pack([*sequences, TokenSequence([1] * 96, 1, 2)], 300)
    tokens = len(batch.tokens)
    attention = PackedAttention(None, 1)
    tensors = inputs(tokens, heads, groups, torch.float32)
    expected = attention(*tensors, batch.segments).detach()

    def run() -> Tensor:
        with torch.no_grad():
            found: Tensor = attention(*tensors, batch.segments)
        return found

    torch.testing.assert_close(run(), expected)
    scores = heads * 40 * 60  # all of them are more
    others = 4 * tokens * (5 * heads + 5 * groups) * WIDTH
    assert peak_bytes(run) <= others + 4 * scores * 3


def test_the_gradient_of_rows_that_are_picked_often_is_the_same_every_time() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        values = torch.randn(64, 1024, requires_grad=True)
        places, grad = torch.arange(64).repeat_interleave(16), torch.randn(64 * 16, 1024)
        found = [torch.autograd.grad(rows_of(values, places), values, grad)[0] for _ in range(20)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found)
