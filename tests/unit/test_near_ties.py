"""What counts as a near-tie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specrl.precision.near_ties import Noise, Pick, compare, measure_noise, worst
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.validation.exactness import ExactnessError, check, exactness_metrics, exactness_of

NOISE = Noise(cdf=1e-3, gap=0.1, num_tokens=100)
LEFT = Pick(token=3, u=0.5, lower=0.2, upper=0.5004, gap=1.0, greedy=False)
RIGHT = Pick(token=4, u=0.5, lower=0.4999, upper=0.9, gap=1.0, greedy=False)
DRAFTS = SpeculationStats()
SAME = Pick(token=7, u=0.3, lower=0.1, upper=0.4, gap=1.0, greedy=False)


def test_a_step_of_the_cdf_that_moved_by_no_more_than_noise_explains_a_difference() -> None:
    comparison = compare([{5: SAME, 6: LEFT, 7: SAME}], [{5: SAME, 6: RIGHT}], NOISE)
    assert [(d.request, d.position) for d in comparison.divergences] == [(0, 6)]
    assert comparison.divergences[0].distance == pytest.approx(5e-4)
    assert (comparison.num_tokens, comparison.num_unexplained) == (2, 0)
    found = exactness_of(comparison, comparison, NOISE, DRAFTS)
    assert exactness_metrics(found)["validate/differences_per_1000_tokens"] == 500


@pytest.mark.parametrize(
    "other",
    [
        replace(RIGHT, lower=0.49, upper=0.9),  # the step moved further than noise does
        replace(RIGHT, lower=0.51, upper=0.9),  # u is not in the step of the token picked
        replace(RIGHT, u=0.6),  # another random number
    ],
)
def test_other_differences_are_not_explained(other: Pick) -> None:
    assert compare([{6: LEFT}], [{6: other}], NOISE).num_unexplained > 0


def test_a_token_that_its_own_distribution_does_not_give_is_found_without_a_difference() -> None:
    wrong = replace(SAME, u=0.7)
    comparison = compare([{5: wrong}], [{5: wrong}], NOISE)
    assert not comparison.divergences
    assert comparison.num_unexplained == 2


@pytest.mark.parametrize(("gap", "unexplained"), [(0.05, 0), (0.15, 0), (0.25, 1)])
def test_greedy_differences_are_explained_by_the_distance_of_the_two_best(gap: float, unexplained: int) -> None:
    left, right = (Pick(token, 0.5, 0.2, 0.4, gap, greedy=True) for token in (3, 4))
    assert compare([{6: left}], [{6: right}], NOISE).num_unexplained == unexplained


def test_noise_is_the_largest_movement_over_common_tokens() -> None:
    moved = replace(SAME, lower=0.1002, upper=0.3995, gap=1.3)
    noise = measure_noise([{5: SAME, 6: LEFT}], [{5: moved, 6: RIGHT}])
    assert noise.cdf == pytest.approx(5e-4)
    assert noise.gap == pytest.approx(0.3)
    assert noise.num_tokens == 1


def test_a_response_that_only_goes_on_is_an_error() -> None:
    with pytest.raises(ValueError, match="equal as far as"):
        compare([{5: SAME}], [{5: SAME, 6: LEFT}], NOISE)


@pytest.mark.parametrize(("broken", "message"), [("sampled", "sampled responses"), ("greedy", "greedy responses")])
def test_a_failed_gate_is_an_error_with_its_figures(broken: str, message: str) -> None:
    fine = compare([{5: SAME}], [{5: SAME}], NOISE)
    wrong = compare([{6: LEFT}], [{6: replace(RIGHT, u=0.6)}], NOISE)
    good = exactness_of(fine, fine, NOISE, DRAFTS)
    check(good)
    assert exactness_metrics(good)["validate/unexplained_differences"] == 0
    with pytest.raises(ExactnessError, match=message):
        check(exactness_of(**{"sampled": fine, "greedy": fine, broken: wrong}, noise=NOISE, drafts=DRAFTS))


def test_noise_is_never_assumed_below_one_rounding_of_a_logit() -> None:
    measured = Noise(cdf=0.0, gap=0.5, num_tokens=10)
    assert measured.or_rounding("float32") == measured
    assert measured.or_rounding("bfloat16") == Noise(cdf=2**-6, gap=0.5, num_tokens=10)
    assert worst(measured, NOISE) == Noise(cdf=1e-3, gap=0.5, num_tokens=110)
