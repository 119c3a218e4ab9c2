"""The learning-rate schedule that policy, warm start and drafter share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from transformers import LlamaConfig, LlamaForCausalLM

from specrl.config import parse_config
from specrl.config.training import LrDecay
from specrl.distributed import Ranks, join, leave
from specrl.training.batches import TokenSequence, pack
from specrl.training.megatron.policy import Policy
from specrl.training.schedules import lr_factor
from specrl.training.update import learning_rate


def factors(num_steps: int, decay: LrDecay, warmup_steps: int = 0, final_fraction: float = 0.1) -> list[float]:
    return [
        lr_factor(step, num_steps, decay=decay, warmup_steps=warmup_steps, final_fraction=final_fraction)
        for step in range(num_steps + 1)
    ]


def test_a_constant_rate_is_the_peak_from_the_first_step() -> None:
    assert factors(5, "constant") == [1.0] * 6


def test_the_warm_up_ends_at_the_peak() -> None:
    assert factors(6, "constant", warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_decay_begins_at_the_peak_and_ends_at_its_fraction(decay: LrDecay) -> None:
    found = factors(10, decay, final_fraction=0.2)
    assert (found[0], found[5]) == (1.0, pytest.approx(0.6))
    assert found[-1] == pytest.approx(0.2)
    assert found == sorted(found, reverse=True)
    assert lr_factor(99, 10, decay=decay, warmup_steps=0, final_fraction=0.2) == found[-1]


@given(st.integers(1, 50), st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 60), st.floats(0, 1))
def test_no_rate_is_above_the_peak_or_below_zero(
    num_steps: int, decay: LrDecay, warmup_steps: int, final_fraction: float
) -> None:
    assert all(0 <= factor <= 1 for factor in factors(num_steps, decay, warmup_steps, final_fraction))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


def test_the_policy_follows_its_schedule(tmp_path: Path, ranks: Ranks) -> None:
    shape = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2)).save_pretrained(tmp_path)
    schedule = {"lr": 1e-3, "lr_schedule": "linear", "lr_warmup_steps": 2}
    config = parse_config({"name": "rates", "policy": schedule, "train": {"num_steps": 4}})
    policy = Policy(tmp_path, config.policy, dtype="float32", ranks=ranks, seed=0)
    batches = pack([TokenSequence([1, 2, 3], 1, 0)], 8)
    rates = [
        policy.train_step(batches, lambda lp, *_: (-lp.sum(), {}), lr=learning_rate(config, step, 0))[0]["lr"]
        for step in range(4)
    ]
    assert rates == pytest.approx([0.5e-3, 0.775e-3, 0.55e-3, 0.325e-3])
    assert policy.train_step(batches, lambda lp, *_: (-lp.sum(), {}), lr=1e-4)[0]["lr"] == 1e-4
    assert torch.isfinite(next(policy.model.parameters())).all()


@pytest.mark.parametrize("updates", [1, 4])
def test_the_policys_rate_goes_by_steps_however_many_updates_they_have(updates: int) -> None:
    """Mutation: a schedule that counts updates, of which steps without signal have none."""
    policy = {"lr": 1.0, "lr_schedule": "linear", "lr_final_fraction": 0.0}

    def rates(num_steps: int) -> list[float]:
        train = {"num_steps": num_steps, "updates_per_step": updates}
        config = parse_config({"name": "rates", "policy": policy, "train": train})
        return [learning_rate(config, step, 0) for step in range(num_steps)]

    assert rates(8)[6] == pytest.approx(0.25)
    assert rates(16)[8] == pytest.approx(0.5)  # an extended run goes on at its place in the longer schedule
