"""A micro-batch trained in parts: as if it were whole, in bounded memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from specrl.config import DrafterConfig
from specrl.training.drafter import attention, chains, ttt
from specrl.training.drafter.trainer import Drafter
from specrl.training.drafter.ttt import feed_context, target_probs
from specrl.training.features import Features
from tests.mtp_models import greedy_features, write_mtp_model
from tests.peak_memory import peak_bytes
from tests.unit.test_drafter import (
    ALONE,
    DEEP,
    DRAFT_VOCAB,
    enlarge,
    make_drafter,
    make_features,
    objective,
    packed,
    trained,
    write_policy,
)

LENGTHS = [(3, 9), (2, 1), (7, 4), (1, 6), (5, 2), (1, 30)]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


def enlarged(policy_dir: Path, **settings: Any) -> Drafter:
    drafter = make_drafter(policy_dir, **settings)
    torch.manual_seed(1)
    enlarge(drafter)
    return drafter


@pytest.mark.parametrize("most", [1, 4, 7, 30, 64, 1024])
def test_parts_are_all_chains_in_order_and_none_is_too_large(
    policy_dir: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(chains, "MAX_CHAINS", most)
    drafter = make_drafter(policy_dir, ttt_steps=4)
    batch = packed(drafter, make_features(drafter, LENGTHS))
    assert batch.chains_per_row == [8, 3, 5, 1, 29]  # a response of one token has no chain
    parts = list(batch.parts())
    assert [chain for part in parts for chain in range(part.chains.start, part.chains.stop)] == list(range(46))
    assert len(parts) == -(-46 // most)
    for part in parts:
        assert part.size <= most
        rows = zip(pairwise(part.spans.queries), pairwise(part.spans.keys), strict=True)
        seen = [
            part.slots[first : last - (stop - 1 - chain)]
            for (start, stop), (first, last) in rows
            for chain in range(start, stop)
        ]
        for start, slots in zip(batch.starts[part.chains], seen, strict=True):
            assert slots[-1] == start and len(slots) == batch.positions[start] + 1
            assert batch.slot_rows[slots].unique().numel() == 1
    for step, alive in enumerate(batch.alive):
        assert torch.equal(torch.cat([part.alive[step] for part in parts if len(part.alive) > step]), alive)


@pytest.mark.parametrize(("most", "shape"), [(1, {}), (4, {}), (4, DEEP), (7, {}), (30, {})])
def test_training_in_parts_gives_the_same_loss_gradients_and_sums(
    policy_dir: Path, monkeypatch: pytest.MonkeyPatch, most: int, shape: dict[str, Any]
) -> None:
    drafter = enlarged(policy_dir, ttt_steps=4, **shape)
    features = make_features(drafter, LENGTHS)
    whole = trained(drafter, features)
    assert whole[1].abs().max() > 0
    monkeypatch.setattr(chains, "MAX_CHAINS", most)
    torch.testing.assert_close(trained(drafter, features), whole, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(attention, "MAX_SCORES", 100)
    torch.testing.assert_close(trained(drafter, features), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("steps", "shape"), [(1, {}), (3, {}), (3, DEEP)])
def test_gradients_are_those_of_one_graph_over_all_chains(policy_dir: Path, steps: int, shape: dict[str, Any]) -> None:
    drafter = enlarged(policy_dir, ttt_steps=steps, **shape)
    features = make_features(drafter, LENGTHS)
    found = trained(drafter, features)
    batch = packed(drafter, features)
    [part] = batch.parts()
    probs, counts = target_probs(drafter.model, batch, part), batch.loss_counts()
    loss = torch.zeros(())
    logits = ttt.unroll(drafter.model, batch, feed_context(drafter.model, batch), part)
    for step, (step_logits, alive) in enumerate(zip(logits, batch.alive, strict=True)):
        terms = F.cross_entropy(step_logits, probs[alive + step], reduction="none")
        loss = loss + 0.8**step * (terms * batch.target_in_vocab[alive + step]).sum() / counts[step].float()
    drafter._gradient.zero_()
    loss.backward()
    torch.testing.assert_close(found[:2], (loss.detach(), drafter._gradient), rtol=1e-4, atol=1e-5)


def test_a_policys_own_layer_trains_in_parts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_mtp_model(tmp_path / "mimo")
    drafter = Drafter.of_policy(directory, DrafterConfig(), ALONE)
    prompts = torch.randint(128, (3, 3), generator=torch.Generator().manual_seed(4))
    features = greedy_features(directory, prompts, 12)
    whole = drafter._step(drafter._pack(features), 0.0, measure=True)
    gradient = learnt(drafter, features)
    monkeypatch.setattr(chains, "MAX_CHAINS", 5)
    parts = drafter._step(drafter._pack(features), 0.0, measure=True)
    torch.testing.assert_close(parts[:2], whole[:2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(learnt(drafter, features), gradient, rtol=1e-4, atol=1e-5)


def learnt(drafter: Drafter, features: Features) -> torch.Tensor:
    batch = drafter._pack(features)
    assert batch is not None
    drafter._gradient.zero_()
    ttt.train_chains(drafter.model, batch, objective(drafter), batch.loss_counts(), learn=True)
    return drafter._gradient.clone()


def test_a_longer_response_costs_its_slots_but_no_logits(policy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter(policy_dir, ttt_steps=7)

    def peak(length: int) -> int:
        features = make_features(drafter, [(4, length)])
        return peak_bytes(lambda: trained(drafter, features))

    lengths = [300, 600]
    monkeypatch.setattr(chains, "MAX_CHAINS", 64)
    monkeypatch.setattr(attention, "MAX_SCORES", 64 * 4 * 64)
    short, long = (peak(length) for length in lengths)
    monkeypatch.setattr(chains, "MAX_CHAINS", 1024)
    whole_short, whole_long = (peak(length) for length in lengths)
    # One distribution in float32 at each step is what a chain has at the least.
    assert whole_long - whole_short > 300 * 7 * 4 * DRAFT_VOCAB
    assert long - short < (whole_long - whole_short) / 8, (short, long, whole_short, whole_long)
