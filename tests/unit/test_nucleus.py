"""Top-k and top-p for many rows at once against what they mean for one row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specrl.rollout.sampling import gumbel as sampling
from specrl.rollout.sampling.gumbel import noise, pick, weights

LN_2 = math.log(2)
JUST_BELOW_ONE = 1 - 2.0**-24


def reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Row by row, over the whole vocabulary: every logit that is at least that of the last token inside stays."""
    scaled = logits.float() / torch.where(temperature == 0, 1.0, temperature)[:, None]
    probs = weights(logits, temperature, torch.zeros_like(top_k), torch.ones_like(top_p))  # nothing is dropped
    torch.testing.assert_close(probs, (scaled - scaled.amax(-1, keepdim=True)).exp(), rtol=1e-4, atol=2.0**-35)
    for row in range(len(probs)):
        order = logits[row].float().sort(descending=True)
        values, weight, k, p = order.values, probs[row, order.indices], int(top_k[row]), float(top_p[row])
        if 0 < k < len(values):
            weight, values = weight[values >= values[k - 1]], values[values >= values[k - 1]]
        least = values[-1]
        if p < 1:
            cumulative = weight.double().cumsum(0)
            least = values[torch.searchsorted(cumulative, cumulative[-1] * p).clamp(max=len(values) - 1)]
        probs[row, logits[row].float() < least] = 0
    return probs


def logits_of(kind: str, vocab: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(vocab, generator=generator)
    if kind == "few values":  # ties everywhere
        return (2 * noise).round()
    if kind == "two values":  # sums that are exact, so that top-p falls on a token's edge
        return torch.where(noise > 0, 0.0, -torch.inf) if bool((noise > 0).any()) else torch.zeros(vocab)
    if kind == "equal":
        return torch.zeros(vocab)
    return noise * {"flat": 0.1, "wide": 2.0, "peaked": 8.0}[kind]


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["few values", "two values", "equal", "flat", "wide", "peaked"]),
        st.sampled_from([0, 1, 2, 20, 127, 128, 129, 500, 1024, 4000]),
        st.sampled_from([1.0, JUST_BELOW_ONE, 0.99, 0.95, 0.75, 0.5, 0.25, 1 / 3, 1e-3, 1e-7]),
        st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=120, deadline=None)
@given(ROWS, st.sampled_from([3, 64, 100, 128, 129, 1024, 2048, 3001]), st.integers(0, 2**32))
def test_many_rows_keep_what_each_keeps_alone(rows: list[tuple[str, int, float, float]], vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([logits_of(kind, vocab, generator) for kind, *_ in rows])
    top_k = torch.tensor([k for _, k, _, _ in rows])
    top_p = torch.tensor([p for *_, p, _ in rows], dtype=torch.float32)
    temperature = torch.tensor([t for *_, t in rows])
    expected = reference(logits, temperature, top_k, top_p)
    assert torch.equal(weights(logits, temperature, top_k, top_p), expected)
    seeds, positions = torch.randint(2**62, (2, len(rows)), generator=generator) >> torch.tensor([[0], [40]])
    tokens, logprobs, log_kept_mass = pick(logits, temperature, top_k, top_p, seeds, positions)
    drawn = temperature > 0
    mass, total = expected.double().gather(-1, tokens[:, None])[:, 0], expected.double().sum(-1)
    assert bool((mass > 0)[drawn].all())
    races = expected.double().log() + noise(seeds, positions, vocab).double() * LN_2
    assert bool((races.gather(-1, tokens[:, None])[:, 0] > races.amax(-1) - 1e-4)[drawn].all())
    torch.testing.assert_close(logprobs[drawn].double(), (mass / total).log()[drawn], atol=1e-4, rtol=0)
    assert torch.equal(tokens[~drawn], logits.argmax(-1)[~drawn])
    assert bool((logprobs[~drawn] == 0).all())
    whole = (logits.double() / torch.where(drawn, temperature, 1.0).double()[:, None]).softmax(-1)
    kept = (whole * (expected > 0)).sum(-1)
    torch.testing.assert_close(log_kept_mass[drawn].double(), kept.log()[drawn], atol=1e-4, rtol=0)
    assert bool((log_kept_mass[~drawn | (top_k == 0) & (top_p == 1)] == 0).all())


@pytest.mark.parametrize("scale", [1.0, 3.0, 4.0, 9.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.95), (700, 0.9), (2000, 1.0), (2000, 0.99)])
def test_nuclei_of_any_size_are_found(scale: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(6, 20_000, generator=torch.Generator().manual_seed(6)) * scale
    settings = torch.ones(6), torch.full((6,), top_k), torch.full((6,), top_p)
    assert torch.equal(weights(logits, *settings), reference(logits, *settings))


def test_the_size_of_a_piece_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 500, generator=torch.Generator().manual_seed(8)) * 3
    limits = torch.ones(9), torch.tensor([0, 5, 0] * 3), torch.tensor([0.9, 1.0, 1.0] * 3)
    settings = *limits, torch.arange(9), torch.arange(9)
    whole = pick(logits, *settings)
    monkeypatch.setattr(sampling, "CHUNK_ELEMENTS", {"cpu": 1000})
    assert all(torch.equal(a, b) for a, b in zip(whole, pick(logits, *settings), strict=True))
