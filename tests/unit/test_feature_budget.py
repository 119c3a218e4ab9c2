"""The drafter's features of a policy update: recorded within their budget, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specrl.config import Config, PolicyConfig, parse_config
from specrl.distributed import Ranks, join, leave
from specrl.schemas import Rollout
from specrl.training.batches import within_budget
from specrl.training.features import Features, FeatureSpec
from specrl.training.megatron import model
from specrl.training.megatron.capture import LayerInputs
from specrl.training.megatron.policy import Policy
from specrl.training.update import update_policy
from tests.unit.test_drafter import VOCAB, write_policy

# isort: split
from megatron.core import parallel_state

SPEC = FeatureSpec((1, 3, 6), torch.arange(0, VOCAB, 2))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 200))
def test_the_budget_takes_the_first_micro_batches_and_at_least_one(areas: list[int], max_tokens: int) -> None:
    kept = areas[: within_budget(areas, max_tokens)]
    assert len(kept) == min(1, len(areas)) or sum(kept) <= max_tokens
    assert kept == areas or sum(areas[: len(kept) + 1]) > max_tokens


def step_config(max_tokens: int, updates: int) -> Config:
    return parse_config(
        {
            "name": "run",
            "policy": {"tokens_per_micro_batch": 40},
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
    metrics, features = update_policy(policy, rollouts, step_config(max_tokens, updates), SPEC)
    return metrics, features, {name: tensor.clone() for name, tensor in policy.hf_weights()}, rollouts


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    calls: list[str] = []
    function = getattr(owner, name)

    def counted(*args: Any) -> Any:
        calls.append(name)
        return function(*args)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("updates", [1, 2])
def test_features_beyond_the_budget_are_never_recorded_and_the_rest_stays_as_it_was(
    policy_dir: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    heads, layers = count_calls(monkeypatch, model, "columns_of"), count_calls(monkeypatch, LayerInputs, "micro_batch")
    metrics, everything, weights, rollouts = updated(policy_dir, ranks, 10**6, updates)
    assert len(everything) == len(heads) == len(layers) > 4
    first, second = (item.tokens.numel() for item in everything[:2])
    # One at least; two exactly; into the second update's; all.
    for max_tokens in (1, first + second, sum(item.tokens.numel() for item in everything) - 1):
        kept = everything[: within_budget([item.tokens.numel() for item in everything], max_tokens)]
        heads.clear()
        layers.clear()
        again, features, after, same = updated(policy_dir, ranks, max_tokens, updates)
        assert len(features) == len(heads) == len(layers) == len(kept) < len(everything)
        for found, expected in zip(features, kept, strict=True):
            assert all(torch.equal(vars(found)[name], tensor) for name, tensor in vars(expected).items())
        seconds = {"logprob_s": 0.0}  # a time differs from run to run
        assert again | seconds == metrics | seconds and same == rollouts
        assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())
