"""The drafter's features of a policy update: an even sample within its budget, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from specrl.config import Config, DrafterConfig, PolicyConfig, parse_config
from specrl.distributed import Ranks, join, leave
from specrl.models.directory import HEAD
from specrl.schemas import Rollout
from specrl.training import sample
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features, sequences
from specrl.training.megatron.capture import LayerInputs
from specrl.training.megatron.policy import Policy
from specrl.training.rollouts import RolloutBatch
from specrl.training.sample import even_sample, sample_sequences
from specrl.training.update import update_policy
from tests.unit.test_drafter import VOCAB, write_policy

# isort: split
from megatron.core import parallel_state

LAYERS = (1, 3, 6)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@given(
    st.lists(st.integers(1, 10_000), min_size=1, max_size=60),
    st.integers(1, 100_000),
    st.floats(0, 1, exclude_max=True),
)
def test_a_sample_is_spread_over_the_lengths_as_all_sequences_are(
    lengths: list[int], budget: int, offset: float
) -> None:
    sample = even_sample(lengths, offset, lambda chosen: sum(lengths[index] for index in chosen) <= budget)
    chosen = [lengths[index] for index in sample]
    assert len(set(sample)) == len(sample) and chosen == sorted(chosen, reverse=True)
    assert sum(chosen) <= budget or len(chosen) == 1
    assert len(chosen) == len(lengths) or sum(lengths) > budget
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for count in range(1, len(order) + 1):  # of any number of the longest, the sample has its share
        share = len(set(order[:count]) & set(sample))
        assert abs(share - len(sample) * count / len(order)) <= 1 + 1e-6


def test_every_sequence_is_as_likely_as_any_other_and_is_cut_at_all_places() -> None:
    lengths = [40, 40, 60, 80, 100, 500, 600, 700, 900, 1000]
    batches = pack([TokenSequence([0] * length, 20, index) for index, length in enumerate(lengths)], 1000)
    times, places = Counter[int](), list[float]()
    for seed in range(400):
        made = [
            sample_sequences([batches], max_tokens=2048, tokens_per_micro_batch=600, owners=2, seed=seed)
            for _ in range(2)
        ]
        assert made[0] == made[1]
        sample = made[0]
        assert sorted(sample.windows) == sorted(index for group in sample.groups for index in group)
        areas = [
            len(group) * max(sample.windows[i].stop - sample.windows[i].start for i in group) for group in sample.groups
        ]
        assert sum(areas) <= 2048 and max(areas) <= 600
        times.update(list(sample.windows))
        for index, window in sample.windows.items():
            assert window.stop - window.start == min(lengths[index], 256) and window.stop <= lengths[index]
        places += [window.start / 744 for index, window in sample.windows.items() if index == 9]
        owners = [[sample.windows[index].owner for index in group] for group in sample.groups]
        assert all(abs(group.count(0) - group.count(1)) <= 1 for group in owners)
    assert max(times.values()) < 1.2 * min(times.values())
    assert min(places) < 0.1 and max(places) > 0.9 and 0.4 < sum(places) / len(places) < 0.6


def step_config(max_tokens: int, updates: int) -> Config:
    return parse_config(
        {
            "name": "run",
            "policy": {"tokens_per_micro_batch": 25},
            "drafter": {"max_tokens_per_step": max_tokens},
            "train": {"updates_per_step": updates},
        }
    )


def step_rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for index in range(12):
        tokens = torch.randint(VOCAB, (4 + 3 * (index % 5),), generator=generator).tolist()
        text = [-3.0] * len(tokens)
        made.append(Rollout(0, 0, index // 4, index % 4, 0, 0, 0, [1, 2, 3], tokens, text, "", "", "stop"))
        made[-1].advantage = 1.0 if index % 2 else -1.0
    return made


def updated(
    policy_dir: Path, ranks: Ranks, max_tokens: int, updates: int
) -> tuple[dict[str, float], list[Features], dict[str, Tensor], list[Rollout]]:
    policy = Policy(policy_dir, PolicyConfig(lr=1e-2), dtype="float32", ranks=ranks, seed=0)
    rollouts = step_rollouts()
    batch = RolloutBatch.gather(ranks, rollouts)
    update = update_policy(policy, batch, step_config(max_tokens, updates), LAYERS, step=0)
    features = [item for item in update.features if item is not None]
    return update.metrics, features, {name: tensor.clone() for name, tensor in policy.hf_weights()}, rollouts


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    calls: list[str] = []
    function = getattr(owner, name)

    def counted(*args: Any) -> Any:
        calls.append(name)
        return function(*args)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("updates", [1, 2])
def test_features_outside_the_sample_are_never_recorded_and_the_rest_stays_as_it_was(
    policy_dir: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    monkeypatch.setattr(sample, "MIN_WINDOW", 11)
    layers = count_calls(monkeypatch, LayerInputs, "micro_batch")
    metrics, everything, weights, rollouts = updated(policy_dir, ranks, 10**6, updates)
    recorded = len(layers)
    # A step of the drafter learns from no more responses than if prompts were not shared.
    assert len(everything) >= recorded > 4 and metrics["sampled_fraction"] == 1
    assert metrics["real_token_share"] == 1 and 0 < metrics["shared_token_share"] < 0.5
    area = sum(item.tokens.numel() for item in everything)
    for max_tokens in (1, area // 3, area - 1):
        layers.clear()
        again, features, after, same = updated(policy_dir, ranks, max_tokens, updates)
        assert any(item.mask.any() for item in features)
        assert max_tokens == area - 1 or len(layers) < recorded
        assert sum(item.tokens.numel() for item in features) <= max(max_tokens, 11)
        assert_parts(features, everything)
        changed = {"logprob_s": 0.0, "sampled_fraction": 0.0}  # a time differs from run to run
        assert again["sampled_fraction"] <= 1 and again | changed == metrics | changed and same == rollouts
        assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())


def mean_logprob(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs.sum() / 36, {}


def assert_parts(features: list[Features], everything: list[Features]) -> None:
    """Each row is a part of one of the whole sequences, to the bit."""
    whole = [row for item in everything for row in sequences(item)]
    for item in features:
        for row, start in zip([item.choose([row]) for row in range(len(item.mask))], item.starts.tolist(), strict=True):
            width = int(row.mask[0].nonzero()[-1]) + 2
            part = slice(start, start + width)
            [found] = [other for other in whole if torch.equal(other.tokens[:, part], row.tokens[:, :width])]
            assert torch.equal(found.hidden[:, part], row.hidden[:, :width])
            inside = row.mask[:, :width]
            top1, expected = row.target_top1[:, :width], found.target_top1[:, part]
            assert torch.equal(top1[inside], expected[inside]) and not top1[~inside].any()


def test_a_drafter_computes_the_policys_logits_from_features_and_a_copy_of_its_head(
    policy_dir: Path, ranks: Ranks
) -> None:
    policy = Policy(policy_dir, PolicyConfig(), dtype="float32", ranks=ranks, seed=0, trainable=False)
    drafter = Drafter.create(policy_dir, DrafterConfig(), torch.arange(0, VOCAB, 2), ranks)
    assert drafter.feature_layers == (1, 3, 5, 6)
    tokens = [(3 + 5 * step) % VOCAB for step in range(9)]
    (features,) = policy.forward_features([pack([TokenSequence(tokens, 2, 0)], 50)[0]], drafter.feature_layers)
    last = features.hidden[features.mask][:, -drafter.shape.hidden_size :]
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(policy_dir)(torch.tensor([tokens])).logits[features.mask]
    expected = logits[:, drafter.draft_tokens]
    torch.testing.assert_close(drafter.model.policy_logits(last), expected, atol=1e-4, rtol=0)
    for name, tensor in policy.hf_weights():  # as a refit gives them to it
        drafter.share(name, 2 * tensor if name == HEAD else tensor)
    torch.testing.assert_close(drafter.model.policy_logits(last), 2 * expected, atol=2e-4, rtol=0)
