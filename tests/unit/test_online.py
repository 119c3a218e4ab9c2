"""The drafter's online training: the learning rate by measured gain, and the way back to the best weights."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from specrl.training.drafter.online.online import OnlineTraining
from specrl.training.drafter.online.rate import EVERY, LEAST_RESPONSES, OnlineRate, PairedCounts
from specrl.training.drafter.online.spot import SpotTraining
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features, sequences, spread_sequences
from tests.unit.test_drafter import PARALLEL, arithmetic_features, assert_equal_state, make_drafter, write_policy


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


def counts_with(difference: int, responses: int = 16) -> PairedCounts:
    """Counts in which about each response has the same difference."""
    return PairedCounts.of((10, 20 + difference + number % 2, 20) for number in range(responses))


def test_the_gain_has_the_standard_error_of_a_ratio_and_parts_add_up() -> None:
    generator = random.Random(0)
    rows = [(generator.randint(1, 30), generator.randint(0, 60), generator.randint(0, 60)) for _ in range(40)]
    drafts = sum(n for n, _, _ in rows)
    gain = sum(present - best for _, present, best in rows) / drafts
    residuals = [(present - best - gain * n) ** 2 for n, present, best in rows]
    error = sqrt(fmean(residuals) * len(rows) ** 2 / (len(rows) - 1)) / drafts
    assert PairedCounts.of(rows).gain() == pytest.approx((gain, error))
    assert PairedCounts.total(
        [PairedCounts.of(rows[:7]), PairedCounts(), PairedCounts.of(rows[7:])]
    ) == PairedCounts.of(rows)


def test_the_rate_rises_with_a_clear_gain_and_falls_with_a_clear_loss_within_its_range() -> None:
    rate = OnlineRate(reach=3.0)
    assert [rate.judge(counts_with(5)) for _ in range(5)] == ["better"] * 5
    assert rate.factor == 3.0
    assert rate.judge(counts_with(-5)) == "worse" and rate.factor == 1.5
    for _ in range(5):
        rate.judge(counts_with(-5))
    assert rate.factor == pytest.approx(1 / 3)
    constant = OnlineRate(reach=1.0)
    assert constant.judge(counts_with(5)) == "better" and constant.judge(counts_with(-5)) == "worse"
    assert constant.factor == 1.0


def test_what_noise_explains_or_few_responses_show_changes_nothing() -> None:
    rate = OnlineRate(reach=3.0)
    one_response = PairedCounts.of([(10, 25, 20), *[(10, 20, 20)] * 15])
    assert rate.judge(one_response) == "unclear"
    assert rate.judge(PairedCounts.of([(10, 20, 20)] * 16)) == "unclear"
    assert rate.judge(counts_with(5, LEAST_RESPONSES - 1)) == "unclear"
    assert rate.factor == 1.0


def test_a_comparison_is_due_every_few_updates_and_waits_for_enough_responses() -> None:
    rate = OnlineRate(reach=3.0)
    assert [rate.due() for _ in range(EVERY + 1)] == [False] * EVERY + [True]
    rate.judge(counts_with(5, LEAST_RESPONSES - 1))
    assert rate.due()
    rate.judge(counts_with(0))
    assert [rate.due() for _ in range(EVERY)] == [False] * (EVERY - 1) + [True]


def text_of(drafter: Drafter, first: int = 0) -> list[Features]:
    """The features of 32 responses."""
    return [arithmetic_features(drafter, 4 * first + number) for number in range(4)]


def trained_drafter(policy_dir: Path, online_lr: float, **shape: Any) -> Drafter:
    """A drafter that knows its task, and would forget it in updates with a large learning rate."""
    drafter = make_drafter(policy_dir, online_lr=online_lr, **shape)
    drafter.update(text_of(drafter), lr=1e-2, epochs=15)
    return drafter


@pytest.mark.parametrize("shape", [{}, PARALLEL], ids=["one after another", "parallel"])
def test_a_drafter_that_became_worse_goes_back_to_its_best_weights_and_learns_more_slowly(
    policy_dir: Path, shape: dict[str, Any]
) -> None:
    drafter = trained_drafter(policy_dir, online_lr=0.5, **shape)
    online = OnlineTraining(drafter)
    best = copy.deepcopy(drafter.state_dict())
    text = text_of(drafter)
    acceptance = drafter.update(text, lr=0.0)["acceptance_length"]
    for _ in range(EVERY):
        assert online.update(text)["lr"] == 0.5
    assert online.take_events() == []
    found = online.update([])  # nothing to learn from, nothing to compare
    assert "gain" not in found and found["lr"] == 0.5
    online._drafter.config = drafter.config.model_copy(update={"online_lr": 1e-9})  # so that what came back is seen
    found = online.update(text)
    assert found["reverted"] == 1 and found["gain"] < -0.5
    assert found["acceptance_length"] == pytest.approx(acceptance)
    assert found["lr"] == 0.5e-9
    for name, tensor in drafter.state_dict().items():
        if name.startswith("model/"):
            torch.testing.assert_close(tensor, best[name], rtol=0, atol=1e-7)
    (event,) = online.take_events()
    assert "with its best weights" in event and online.take_events() == []


def test_a_drafter_that_became_better_is_the_best_from_then_on_and_learns_faster(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir, online_lr=5e-3)
    online = OnlineTraining(drafter)
    first = copy.deepcopy(drafter.model.state_dict())
    found = [online.update(text_of(drafter)) for _ in range(EVERY + 1)]
    assert [step for step, metrics in enumerate(found) if "gain" in metrics] == [EVERY]
    assert found[EVERY]["gain"] > 0 and found[EVERY]["lr"] > 5e-3 and not online.take_events()
    best = {name: tensor for name, tensor in online.state_dict().items() if name.startswith("best/model/")}
    assert not any(torch.equal(best[f"best/model/{name}"], tensor) for name, tensor in first.items())


def test_online_training_resumes_to_the_bit_on_either_side_of_a_comparison(policy_dir: Path) -> None:
    def start() -> OnlineTraining:
        return OnlineTraining(make_drafter(policy_dir, online_lr=5e-3))

    straight, parts = start(), start()
    for step in range(2 * EVERY):
        text = text_of(straight._drafter, step)
        if step in (1, EVERY, EVERY + 1):
            state = copy.deepcopy(parts.state_dict())
            parts = start()
            parts.load_state_dict(state)
        assert straight.update(text) == parts.update(text)
    assert straight.lr != 5e-3
    assert_equal_state(straight.state_dict(), parts.state_dict())


def test_a_frozen_drafter_keeps_no_history(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir, online_lr=0.0)
    online = OnlineTraining(drafter)
    before = copy.deepcopy(drafter.state_dict())
    assert all(online.update(text_of(drafter))["lr"] == 0 for _ in range(EVERY + 1))
    assert_equal_state(drafter.state_dict(), before)
    assert not any(name.startswith("best/") for name in online.state_dict())


def test_what_was_trained_in_idle_time_is_compared_too(policy_dir: Path) -> None:
    drafter = trained_drafter(policy_dir, online_lr=0.5)
    spot = SpotTraining(drafter)
    online = OnlineTraining(drafter, spot)
    found: dict[str, float] = {}
    for _ in range(EVERY + 1):
        found = online.update(text_of(drafter))
        rate = found["lr"]
        spot.work(lambda: False)
        assert drafter.optimizer.param_groups[0]["lr"] == rate
    assert found["reverted"] == 1 and rate == 0.25


def test_an_update_that_ruins_the_drafter_is_told_from_one_that_does_not(policy_dir: Path) -> None:
    drafter = trained_drafter(policy_dir, online_lr=1e-4)
    online, text = OnlineTraining(drafter), text_of(drafter)
    online.update(text)
    assert not online.is_as_good_as_before(text), "nothing is known of the drafter before the update"
    online.update(text)
    before = copy.deepcopy(drafter.state_dict())
    assert online.is_as_good_as_before(text) and online.is_as_good_as_before([None, *text])
    assert not online.is_as_good_as_before([]) and not online.is_as_good_as_before([None])
    assert_equal_state(drafter.state_dict(), before)
    state = copy.deepcopy(online.state_dict())
    drafter.config = drafter.config.model_copy(update={"online_lr": 0.5})
    online.update(text)  # its first step ruins the drafter, which its other steps measure
    assert not online.is_as_good_as_before(text)
    online.load_state_dict(state)
    drafter.config = drafter.config.model_copy(update={"online_lr": 1e-4})
    online.update(text)
    assert online.is_as_good_as_before(text), "what was usual before a restart counts"


def test_sequences_are_taken_evenly_from_all_micro_batches_of_one_head(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir)
    text = text_of(drafter)
    whole = [row for item in text for row in sequences(item)]
    few = spread_sequences([None, *text], num_tokens=sum(row.tokens.shape[1] for row in whole) // 8)
    assert few is not None and len(few.tokens) == len(whole) // 8
    where = [next(i for i, row in enumerate(whole) if torch.equal(row.hidden[0], taken)) for taken in few.hidden]
    assert where == sorted(where) and where[0] < 8 and where[-1] >= len(whole) - 8
    assert spread_sequences([None], 100) is None
    one = spread_sequences(text, 1)
    assert one is not None and len(one.tokens) == 1
    other = replace(text[1], head=torch.zeros(1))
    kept = spread_sequences([text[0], other], 10**6)
    assert kept is not None and len(kept.tokens) == len(sequences(text[0]))
