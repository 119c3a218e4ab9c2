"""Which drafted tokens are verified: the rule, the drafter's calibrated confidence and the measured cost of rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts import budgets
from specrl.rollout.drafts.acceptance import DRAFTER, REPLAY, DraftOutcome
from specrl.rollout.drafts.budgets import RowCosts, best_budgets
from specrl.rollout.drafts.confidence import CENTRES, Calibration, as_matrix, rising

SETTINGS = ControlSettings()
GENERATOR = np.random.default_rng(3)


def random_chances(requests: int, places: int) -> np.ndarray:
    return np.cumprod(GENERATOR.uniform(0.05, 1, (requests, places)), axis=1)


def seconds(requests: int, places: int, row: float, fixed: float = 0.02) -> np.ndarray:
    return fixed + row * (requests + np.arange(requests * places + 1))


def rate(budgets: list[int], chances: np.ndarray, times: np.ndarray) -> float:
    gained = sum(chances[index, :budget].sum() for index, budget in enumerate(budgets))
    return float((len(chances) + gained) / times[sum(budgets)])


@pytest.mark.parametrize("requests", [1, 2, 8, 32])
def test_a_budget_is_within_the_draft_and_no_other_number_of_tokens_is_faster(requests: int) -> None:
    for row in (0.0, 0.0003, 0.001, 0.004):
        chances = random_chances(requests, 4)
        chances[0, 2:] = 0  # a draft of two tokens
        times = seconds(requests, 4, row)
        budgets = best_budgets(chances, times)
        assert budgets[0] <= 2 and all(0 <= budget <= 4 for budget in budgets)
        best = rate(budgets, chances, times)
        for index, budget in enumerate(budgets):
            for other in {max(0, budget - 1), min(np.count_nonzero(chances[index]), budget + 1)}:
                assert rate([*budgets[:index], int(other), *budgets[index + 1 :]], chances, times) <= best + 1e-9


def test_free_rows_are_all_verified_and_rows_that_cost_more_than_they_bring_are_not() -> None:
    chances = random_chances(8, 3)
    assert best_budgets(chances, np.full(25, 0.02)) == [3] * 8
    # Without fixed costs a row brings at most one token and costs as much as any other.
    assert best_budgets(chances, seconds(8, 3, 0.001, fixed=0.0)) == [0] * 8


def test_more_confidence_never_means_fewer_tokens() -> None:
    for _ in range(50):
        chances, times = random_chances(6, 3), seconds(6, 3, 0.0015)
        before = best_budgets(chances, times)
        surer = chances.copy()
        surer[2] += (1 - surer[2]) * GENERATOR.uniform()
        assert best_budgets(surer, times)[2] >= before[2]


def test_doubtful_drafts_are_cut_and_sure_ones_are_not() -> None:
    chances = np.array([[0.95, 0.9, 0.85], [0.3, 0.1, 0.02]] * 8)
    assert best_budgets(chances, seconds(16, 3, 0.001)) == [3, 0] * 8


def test_nothing_is_cut_for_a_gain_that_is_too_small() -> None:
    chances = np.array([[0.95, 0.9, 0.45]] * 8)
    times = seconds(8, 3, 0.001)
    assert best_budgets(chances, times) == [2] * 8
    assert best_budgets(chances, times, margin=0.05) == [3] * 8


def test_pooling_gives_the_nearest_rising_sequence() -> None:
    assert rising(np.array([0.1, 0.5, 0.3, 0.9]), np.ones(4)).tolist() == [0.1, 0.4, 0.4, 0.9]
    assert rising(np.array([0.9, 0.0]), np.array([1.0, 3.0])).tolist() == pytest.approx([0.225, 0.225])


def observe(calibration: Calibration, acceptance: float, drafts: int, source: str = DRAFTER) -> None:
    """Show drafts of three tokens whose confidence, raised to the power of `acceptance`, is right."""
    generator = random.Random(5)
    for _ in range(drafts):
        confidences = tuple(generator.choice((0.25, 0.65, 0.97)) for _ in range(3))
        right = [generator.random() < confidence**acceptance for confidence in confidences]
        accepted = right.index(False) if False in right else 3
        calibration.observe([DraftOutcome(source, 3, accepted, 0, confidences)])


def test_confidence_is_believed_at_first_and_corrected_by_what_was_accepted() -> None:
    calibration = Calibration(3, SETTINGS)
    asked = np.array([[0.25, 0.65, 0.97]])
    assert calibration.chances(asked)[0].tolist() == pytest.approx([0.25, 0.25 * 0.65, 0.25 * 0.65 * 0.97])
    observe(calibration, 3.0, 600, source=REPLAY)
    assert calibration.chances(asked)[0, 0] == pytest.approx(0.25)
    observe(calibration, 3.0, 600)
    assert calibration.chances(np.array([[0.65, 0.65, 0.65]]))[0, 0] == pytest.approx(0.65**3, abs=0.08)
    found = calibration.chances(np.stack([CENTRES] * 3, axis=1))
    assert (np.diff(found, axis=0) >= 0).all() and (np.diff(found, axis=1) <= 0).all()
    calibration.fade()
    assert 0.65**3 < calibration.chances(np.array([[0.65, 0.65, 0.65]]))[0, 0] < 0.6


def test_a_drafter_without_confidence_is_known_by_place_within_a_few_drafts() -> None:
    calibration = Calibration(3, SETTINGS)
    calibration.observe([DraftOutcome(DRAFTER, 3, 0)] * 20 + [DraftOutcome(DRAFTER, 3, 1)] * 5)
    chances = calibration.unconfident()
    assert chances[0] < 0.3 and (np.diff(chances) < 0).all()


def test_rows_cost_what_was_measured_and_nothing_is_said_before_their_number_has_changed() -> None:
    costs, generator = RowCosts(SETTINGS), random.Random(1)

    def expected(rows: float) -> float:
        return 0.014 + 0.0001 * rows + 0.0008 * max(0, rows - 8)

    for _ in range(20):
        costs.observe(32, expected(32))
    assert costs.seconds(np.array([32])) is None
    for _ in range(80):
        rows = generator.choice((32, 64, 96, 128, generator.randrange(32, 128)))
        pause = 3 if generator.random() < 0.02 else 1
        costs.observe(rows, expected(rows) * generator.gauss(1, 0.05) * pause)
    found = costs.seconds(np.array([32, 64, 128]))
    assert found is not None
    assert found.tolist() == pytest.approx([expected(32), expected(64), expected(128)], rel=0.06)


def test_an_earlier_fit_stays_where_no_new_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Maximum number of iterations reached.")

    costs, other = RowCosts(SETTINGS), RowCosts(SETTINGS)
    for rows in (8, 32) * 20:
        costs.observe(rows, 0.01 + 0.001 * rows)
    before = costs.seconds(np.array([16]))
    assert before is not None
    monkeypatch.setattr(budgets, "nnls", fail)
    for rows in (8, 32) * 20:
        costs.observe(rows, 0.02 + 0.002 * rows)
        other.observe(rows, 0.02 + 0.002 * rows)
    assert costs.seconds(np.array([16])) == pytest.approx(before, rel=1e-12)
    assert other.seconds(np.array([16])) is None


def test_drafts_of_different_lengths_make_one_matrix() -> None:
    assert as_matrix([[0.5], [], [0.5, 0.25]]).tolist() == [[0.5, 0], [0, 0], [0.5, 0.25]]
    assert as_matrix([[], []]).shape == (2, 1)
