"""The hand-written forward and backward passes of the policy, against autograd on the textbook formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from specrl.training.megatron import cpu_layers
from specrl.training.megatron.cpu_layers import Rotary, RotaryCausalAttention, SwiGLU, _RMSNorm
from specrl.training.megatron.scores import columns_of, most_likely, token_scores
from tests.peak_memory import peak_bytes


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def assert_same(ours: Callable[..., Tensor], textbook: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Outputs and gradients agree; the textbook computes in float64."""
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = textbook(*doubles)
    found = ours(*inputs)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    tolerance = 3e-2 if inputs[0].dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    for mine, reference in zip(inputs, doubles, strict=True):
        assert mine.grad is not None and reference.grad is not None
        scale = float(reference.grad.abs().max())
        torch.testing.assert_close(mine.grad.double() / scale, reference.grad / scale, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    def textbook(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt()

    assert_same(lambda x, w: _RMSNorm.apply(x, w, 1e-2), textbook, leaves((5, 3, 16), (16,), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(dtype: torch.dtype) -> None:
    def textbook(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    assert_same(SwiGLU(), textbook, leaves((5, 3, 16), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
def test_rotary_causal_attention(heads: int, groups: int, dtype: torch.dtype) -> None:
    seq, batch, width = 7, 2, 8
    frequencies = 1.0 / 100.0 ** (torch.arange(0, width, 2) / width)

    def rotate(x: Tensor) -> Tensor:  # [seq, batch, heads, width]
        angles = torch.outer(torch.arange(seq).double(), frequencies.double())
        cos, sin = (torch.cat((part, part), -1)[:, None, None] for part in (angles.cos(), angles.sin()))
        x1, x2 = x.chunk(2, -1)
        return x * cos + torch.cat((-x2, x1), -1) * sin

    def textbook(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (part.repeat_interleave(heads // groups, 2) for part in (rotate(key), value))
        scores = torch.einsum("sbhw,tbhw->bhst", rotate(query), key) / width**0.5
        scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), float("-inf"))
        return torch.einsum("bhst,tbhw->sbhw", scores.softmax(-1), value).flatten(2)

    attention = RotaryCausalAttention(None, Rotary(frequencies))
    shapes = ((seq, batch, heads, width), (seq, batch, groups, width), (seq, batch, groups, width))
    assert_same(lambda q, k, v: attention(q, k, v, None), textbook, leaves(*shapes, dtype=dtype))


@pytest.mark.parametrize("most", [2**26, 2 * 2 * 3 * 96 * 40, 1])
def test_attention_without_a_gradient_is_the_same_and_bounds_its_scores(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq, batch, heads, groups, width = 96, 2, 6, 2, 8
    attention = RotaryCausalAttention(None, Rotary(torch.ones(width // 2)))
    inputs = leaves((seq, batch, heads, width), (seq, batch, groups, width), (seq, batch, groups, width))
    expected = attention(*inputs, None).detach()
    monkeypatch.setattr(cpu_layers, "MAX_SCORES", most)

    def run() -> Tensor:
        with torch.no_grad():
            found: Tensor = attention(*inputs, None)
        return found

    torch.testing.assert_close(run(), expected)
    scores = min(batch * heads * seq * seq, max(most, batch * heads * seq))
    others = 4 * seq * batch * (5 * heads + 4 * groups) * width
    assert peak_bytes(run) <= others + 4 * scores * 3


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_log_probs_and_entropy(
    group: dist.ProcessGroup, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrl.training.megatron.scores.CHUNK_ELEMENTS", {"cpu": 100})
    targets = torch.tensor([0, 30, 7, 7, 12, 3, 30])

    def ours(logits: Tensor) -> Tensor:
        # A copy: the logits are overwritten.
        return token_scores(logits.clone(), targets, temperature=temperature, first=0, group=group)[0]

    def textbook(logits: Tensor) -> Tensor:
        return (logits / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    assert_same(ours, textbook, leaves((7, 31)))
    (logits,) = leaves((7, 31))
    _, entropy = token_scores(logits * 3, targets, temperature=temperature, first=0, group=group)
    expected = torch.distributions.Categorical(logits=logits.detach() * 3 / temperature).entropy()
    torch.testing.assert_close(entropy, expected, atol=1e-5, rtol=1e-5)
    assert not entropy.requires_grad


def test_nothing_to_score_is_no_error(group: dist.ProcessGroup) -> None:
    (logits,) = leaves((0, 31))
    logprobs, entropy = token_scores(
        logits * 1, torch.zeros(0, dtype=torch.int64), temperature=1.0, first=0, group=group
    )
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)


def test_the_most_likely_token_is_the_lowest_among_equals(group: dist.ProcessGroup) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 0.0, 2.0]])
    assert most_likely(logits, 0, group).tolist() == [1, 0]
    assert torch.equal(columns_of(logits, torch.tensor([2, 0]), 0, group), logits[:, [2, 0]])
