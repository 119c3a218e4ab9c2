"""What counts as a near-tie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specrl.precision.near_ties import FLOOR, Pick, compare, limit_of, measure_noise, rounding_of
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.validation.exactness import ExactnessError, check, exactness_metrics, exactness_of

NOISE = 1e-3
LEFT = Pick(token=3, lead=4e-4)
RIGHT = Pick(token=4, lead=5e-4)
DRAFTS = SpeculationStats()
SAME = Pick(token=7, lead=1.0)


def test_leads_that_are_no_longer_than_noise_moves_them_explain_a_difference() -> None:
    comparison = compare([{5: SAME, 6: LEFT, 7: SAME}], [{5: SAME, 6: RIGHT}], NOISE)
    assert [(d.request, d.position) for d in comparison.divergences] == [(0, 6)]
    assert comparison.divergences[0].distance == pytest.approx(9e-4)
    assert (comparison.num_tokens, comparison.num_unexplained) == (2, 0)
    found = exactness_of(comparison, comparison, NOISE, DRAFTS)
    assert exactness_metrics(found)["validate/differences_per_1000_tokens"] == 500


@pytest.mark.parametrize(
    "other",
    [
        replace(RIGHT, lead=0.01),  # it leads by more than noise moves
        replace(RIGHT, lead=-0.01),  # it does not lead
    ],
)
def test_other_differences_are_not_explained(other: Pick) -> None:
    assert compare([{6: LEFT}], [{6: other}], NOISE).num_unexplained > 0


def test_a_token_that_its_own_distribution_does_not_give_is_found_without_a_difference() -> None:
    wrong = replace(SAME, lead=-0.1)
    comparison = compare([{5: wrong}], [{5: wrong}], NOISE)
    assert not comparison.divergences
    assert comparison.num_unexplained == 2


@pytest.mark.parametrize(("lead", "unexplained"), [(0.05, 0), (0.09, 0), (0.15, 1)])
def test_greedy_differences_are_explained_by_the_distance_of_the_two_best(lead: float, unexplained: int) -> None:
    left, right = (Pick(token, lead) for token in (3, 4))
    assert compare([{6: left}], [{6: right}], 0.1).num_unexplained == unexplained


def test_noise_is_the_largest_movement_over_common_tokens() -> None:
    moved = replace(SAME, lead=1.3)
    assert measure_noise([{5: SAME, 6: LEFT}], [{5: moved, 6: RIGHT}]) == pytest.approx(0.3)


@pytest.mark.parametrize("moved", [replace(SAME, lead=9.0, rival=3), replace(SAME, lead=float("inf"))])
def test_a_lead_over_another_token_or_over_none_is_no_noise(moved: Pick) -> None:
    """Where top-p keeps a token in one shape alone, leads jump."""
    assert measure_noise([{5: SAME}], [{5: moved}]) == 0


def test_a_response_that_only_goes_on_is_an_error() -> None:
    with pytest.raises(ValueError, match="one is the beginning of the other"):
        compare([{5: SAME}], [{5: SAME, 6: LEFT}], NOISE)


@pytest.mark.parametrize(("broken", "message"), [("sampled", "sampled responses"), ("greedy", "greedy responses")])
def test_a_failed_gate_is_an_error_with_its_figures(broken: str, message: str) -> None:
    fine = compare([{5: SAME}], [{5: SAME}], NOISE)
    wrong = compare([{6: LEFT}], [{6: replace(RIGHT, lead=0.6)}], NOISE)
    good = exactness_of(fine, fine, NOISE, DRAFTS)
    check(good)
    assert exactness_metrics(good)["validate/unexplained_differences"] == 0
    with pytest.raises(ExactnessError, match=message):
        check(exactness_of(**{"sampled": fine, "greedy": fine, broken: wrong}, noise=NOISE, drafts=DRAFTS))


def test_noise_is_never_assumed_below_one_rounding_of_a_logit() -> None:
    assert limit_of(0.0) == limit_of(rounding_of("float32")) == 2 * FLOOR
    assert limit_of(rounding_of("bfloat16")) == 2 * 2**-3
