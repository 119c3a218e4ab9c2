from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.algorithms.advantages import group_advantages, groups_with_signal, zero_signal_fraction
from specrl.config.algorithms import ADVANTAGES, Algorithm
from specrl.training.rollouts import overlong_penalties

GRPO = ADVANTAGES.default()
RLOO = ADVANTAGES.choose("rloo")

rewards_of_groups = st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=6), min_size=1, max_size=5)


def flatten(groups: list[list[float]]) -> tuple[list[float], list[int]]:
    return [r for rewards in groups for r in rewards], [g for g, rewards in enumerate(groups) for _ in rewards]


@pytest.mark.parametrize("advantage", [GRPO, RLOO], ids=str)
@given(groups=rewards_of_groups)
def test_advantages_of_a_group_sum_to_zero(groups: list[list[float]], advantage: Algorithm) -> None:
    rewards, ids = flatten(groups)
    advantages = group_advantages(rewards, ids, advantage)
    for group in range(len(groups)):
        assert sum(a for a, g in zip(advantages, ids, strict=True) if g == group) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("advantage", [GRPO, RLOO], ids=str)
@given(groups=rewards_of_groups)
def test_the_best_response_has_the_largest_advantage(groups: list[list[float]], advantage: Algorithm) -> None:
    rewards, ids = flatten(groups)
    advantages = group_advantages(rewards, ids, advantage)
    for group, own in enumerate(groups):
        scores = [a for a, g in zip(advantages, ids, strict=True) if g == group]
        assert scores[own.index(max(own))] == max(scores)


def test_a_group_does_not_see_another() -> None:
    alone = group_advantages([1.0, 0.0], ["a", "a"], GRPO)
    assert group_advantages([1.0, 5.0, 0.0, 9.0], ["a", "b", "a", "b"], GRPO)[::2] == alone


@pytest.mark.parametrize("advantage", [GRPO, RLOO], ids=str)
def test_equal_rewards_give_exactly_zero(advantage: Algorithm) -> None:
    assert group_advantages([0.3, 0.3, 0.3], [1, 1, 1], advantage) == [0.0, 0.0, 0.0]


def test_without_normalisation_the_difference_stays() -> None:
    centred = ADVANTAGES.choose({"name": "grpo", "normalize_by_std": False})
    assert group_advantages([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], centred) == [0.75, -0.25, -0.25, -0.25]


def test_reinforce_takes_the_mean_of_the_group_and_the_deviation_of_the_step() -> None:
    rewards, groups = [1.0, 0.0, 4.0, 0.0, 2.0, 2.0], [1, 1, 2, 2, 3, 3]
    found = group_advantages(rewards, groups, ADVANTAGES.choose("reinforce++"))
    deviation = math.sqrt((2 * 0.5**2 + 2 * 2.0**2) / 6)
    assert found == pytest.approx([0.5 / deviation, -0.5 / deviation, 2 / deviation, -2 / deviation, 0, 0], rel=1e-4)


def test_rloo_compares_with_the_others_of_the_group() -> None:
    assert group_advantages([1.0, 0.0, 0.0], [0, 0, 0], RLOO) == [1.0, -0.5, -0.5]


def test_zero_signal_fraction_counts_flat_groups() -> None:
    assert zero_signal_fraction([1, 1, 0, 1], ["a", "a", "b", "b"]) == 0.5


def test_dynamic_sampling_keeps_the_groups_whose_rewards_differ() -> None:
    rewards, groups = [1.0, 1.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0], ["b", "a", "b", "c", "a", "c", "d", "d"]
    assert groups_with_signal(rewards, groups) == ["b", "a"]
    assert zero_signal_fraction(rewards, groups) == 0.5
    assert zero_signal_fraction([], []) == 0.0


def trl_punishment(length: int, longest: int, cache: int) -> float:
    """Equation 13 of DAPO as TRL's `get_soft_overlong_punishment` has it, written anew."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


def test_a_long_response_is_punished_on_a_line_that_ends_where_it_is_cut_off() -> None:
    assert overlong_penalties(np.array([0, 12, 14, 15, 16]), 16, 0.25).tolist() == [0.0, 0.0, -0.5, -0.75, -1.0]
    assert overlong_penalties(np.array([1, 16]), 16, 0.0).tolist() == [0.0, 0.0]
    found = overlong_penalties(
        np.arange(20481), 20480, 0.2
    ).tolist()  # the paper's numbers: 16384 tokens, and 4096 more
    assert found == pytest.approx([trl_punishment(length, 20480, 4096) for length in range(20481)], abs=1e-12)
