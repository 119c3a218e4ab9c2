"""The choice of draft lengths: what it expects, and that it is never below plain decoding by its own estimate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrl.rollout.drafts.cost_model import (
    LENGTHS,
    WORTHWHILE,
    Acceptance,
    CostModel,
    Seconds,
    possible_lengths,
)
from specrl.rollout.drafts.device_drafts import Counts
from specrl.rollout.drafts.text_index import DRAFTERS, NOTHING, STORED

K, MAX_BATCH = 15, 48
RATES = st.floats(0, 1)


def counts_of(rates: dict[int, float], drafts: int, k: int = K) -> Counts:
    """The counters of so many drafts of each kind whose tokens are right with these probabilities."""
    seen, right = np.zeros((NOTHING + 1, k), np.int64), np.zeros((NOTHING + 1, k), np.int64)
    offered = np.zeros(NOTHING + 1, np.int64)
    for kind, rate in rates.items():
        chances = drafts * rate ** np.arange(k + 1)
        seen[kind], right[kind], offered[kind] = chances[:-1].round(), chances[1:].round(), drafts
    return Counts(seen, right, offered)


def seconds_of(batch: int, k: int, fixed: float, per_row: float, per_pass: float, drafter_k: int) -> float:
    return fixed + per_row * max(batch * (k + 1) - 16, 0) + per_pass * min(k, drafter_k)


def model_of(
    fixed: float, per_row: float, per_pass: float, drafter_k: int, graph_sizes: tuple[int, ...] = ()
) -> CostModel:
    model = CostModel(MAX_BATCH, K, drafter_k, graph_sizes)
    for batch, k in model.to_measure():
        model.measure(batch, k, seconds_of(batch, k, fixed, per_row, per_pass, drafter_k))
    return model


@given(st.integers(1, 20), st.integers(0, 20))
def test_the_longest_drafts_and_the_drafters_are_among_the_lengths(k: int, drafter_k: int) -> None:
    lengths = possible_lengths(k, min(drafter_k, k))
    assert {0, k, min(drafter_k, k)} <= set(lengths) <= {*LENGTHS, k, drafter_k}
    assert max(lengths) == k
    assert all(length < 0.8 * k for length in set(lengths) - {k, drafter_k})
    assert list(lengths) == sorted(lengths)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-3, 1e-1),
    st.floats(0, 1e-2),
    st.floats(0, 1e-2),
    st.sampled_from([0, 3, 5]),
    RATES,
    RATES,
    st.integers(0, 5000),
    st.sampled_from([(), (1, 2, 4, 8, 16, 32, 64, 128, 256)]),
)
def test_what_is_chosen_is_expected_to_be_the_best_and_never_slower_than_plain(
    fixed: float,
    per_row: float,
    per_pass: float,
    drafter_k: int,
    text: float,
    drafter: float,
    drafts: int,
    graph_sizes: tuple[int, ...],
) -> None:
    model = model_of(fixed, per_row, per_pass, drafter_k, graph_sizes)
    model.acceptance.learn(counts_of({STORED: text, DRAFTERS: drafter}, drafts))
    for batch in range(1, MAX_BATCH + 1):
        length = model.best(batch)
        rates = model.rates(batch)
        assert rates[length] >= rates[0]
        assert rates[length] * (1 + WORTHWHILE) >= max(rates.values()) * (1 - 1e-9)
        assert length == 0 or rates[length] > rates[0] * (1 + WORTHWHILE) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-3, 1e-2), st.floats(1e-5, 1e-3), st.floats(1e-5, 1e-3), st.sampled_from([3, 5]), RATES)
def test_after_enough_drafts_the_choice_is_nearly_the_best_there_is(
    fixed: float, per_row: float, per_pass: float, drafter_k: int, rate: float
) -> None:
    model = model_of(fixed, per_row, per_pass, drafter_k)
    model.acceptance.learn(counts_of({DRAFTERS: rate}, 100_000))
    for batch in (1, 2, 4, 8, 16, 32, 48):
        rates = {
            k: sum(rate**place for place in range(min(k, drafter_k) + 1))
            / seconds_of(batch, k, fixed, per_row, per_pass, drafter_k)
            for k in model.lengths
        }
        assert rates[model.best(batch)] > 0.97 * max(rates.values())


def test_nothing_is_drafted_where_nothing_is_accepted_or_no_text_is_found() -> None:
    for counts in (counts_of({DRAFTERS: 0.0}, 2000), counts_of({NOTHING: 0.0}, 5000)):
        model = model_of(1e-2, 1e-4, 1e-4, 3)
        model.acceptance.learn(counts)
        assert {model.best(batch) for batch in range(1, MAX_BATCH + 1)} == {0}


def test_text_that_is_nearly_always_right_is_drafted_as_far_as_rows_are_free() -> None:
    model = model_of(1e-2, 1e-3, 0.0, 0)
    model.acceptance.learn(counts_of({STORED: 0.99}, 2000))
    lengths = [model.best(batch) for batch in range(1, MAX_BATCH + 1)]
    assert lengths[0] == K > lengths[-1]
    assert lengths == sorted(lengths, reverse=True)


def test_a_batch_takes_as_long_as_the_graph_that_it_is_padded_to() -> None:
    seconds = Seconds(1, (8, 16))
    for batch, value in ((1, 1.0), (4, 1.0), (5, 3.0), (8, 3.0), (16, 9.0)):
        seconds.measure(batch, value)
    assert [round(math.exp(seconds.log(batch)), 6) for batch in (1, 3, 4, 5, 8, 12, 16, 20)] == [
        *(1, 1, 1, 3, 3, 6, 9, 12),
    ]


def test_more_rows_never_take_less_time() -> None:
    seconds = Seconds(0, ())
    for batch, value in ((1, 2.0), (8, 1.0), (16, 4.0)):
        seconds.measure(batch, value)
    logs = [seconds.log(batch) for batch in range(1, 40)]
    assert logs == sorted(logs)


def test_a_machine_that_slows_down_leaves_nearly_the_best_choice() -> None:
    rate, seconds = 0.7, (1e-2, 1e-4, 5e-4, 3)
    model = model_of(*seconds)
    model.acceptance.learn(counts_of({DRAFTERS: rate}, 2000))
    for _ in range(200):
        for batch in (1, 4, 16, 48):
            k = model.best(batch)
            model.observe(batch, k, 2 * seconds_of(batch, k, *seconds))
    for batch in range(1, MAX_BATCH + 1):
        rates = {
            k: sum(rate**place for place in range(min(k, 3) + 1)) / seconds_of(batch, k, *seconds)
            for k in model.lengths
        }
        assert rates[model.best(batch)] > 0.95 * max(rates.values())
    chosen = model.best(16)
    assert math.exp(model._seconds[chosen].log(16)) == pytest.approx(2 * seconds_of(16, chosen, *seconds), rel=0.1)


def test_drafts_that_turn_out_to_be_slow_are_left() -> None:
    model = model_of(1e-2, 1e-5, 1e-5, 3)
    model.acceptance.learn(counts_of({DRAFTERS: 0.5}, 2000))
    assert model.best(4) > 0
    for _ in range(300):
        model.observe(4, model.best(4), 3e-2 if model.best(4) else 1e-2)
        model.observe(48, 0, seconds_of(48, 0, 1e-2, 1e-5, 1e-5, 3))
    assert model.best(4) == 0


def test_new_drafts_outweigh_old_ones_after_a_refit() -> None:
    acceptance = Acceptance(K, 3)
    acceptance.learn(counts_of({DRAFTERS: 0.9}, 5000))
    assert acceptance.by_position()[DRAFTERS, 0] == pytest.approx(0.9, abs=0.01)
    acceptance.fade()
    acceptance.learn(counts_of({DRAFTERS: 0.1}, 5000))
    assert acceptance.by_position()[DRAFTERS, 0] == pytest.approx(0.1, abs=0.1)


def test_the_drafter_brings_nothing_beyond_its_own_length() -> None:
    acceptance = Acceptance(K, 3)
    accepted = acceptance.accepted()
    assert (accepted[3:, DRAFTERS] == accepted[3, DRAFTERS]).all()
    assert (np.diff(accepted[:, STORED]) > 0).all()
    assert accepted.shape == (K + 1, NOTHING)


def test_running_requests_that_are_drafted_badly_get_shorter_drafts_until_the_next_generation() -> None:
    model = model_of(1e-2, 1e-4, 0.0, K)
    model.acceptance.learn(counts_of({DRAFTERS: 0.9}, 2000))
    model.begin()
    long = model.best(4)
    for _ in range(30):
        model.follow(long, 1.5)
    assert 0 < model.best(4) < long
    for _ in range(60):
        model.follow(long, long + 1.0)
    assert model.best(4) == long
    for _ in range(30):
        model.follow(long, 1.5)
    model.begin()
    assert model.best(4) == long


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 0.95), st.integers(1, MAX_BATCH), st.floats(1e-5, 1e-3))
def test_the_choice_settles_on_what_pays_for_those_that_run(rate: float, batch: int, per_row: float) -> None:
    """The running requests have the drafter alone, where on average some text goes on behind it."""
    model = model_of(1e-2, per_row, 1e-4, 3)
    model.acceptance.learn(counts_of({DRAFTERS: rate, STORED: 0.97}, 2000))
    for k in model.lengths:  # what lies between measured batches is another question
        model.measure(batch, k, seconds_of(batch, k, 1e-2, per_row, 1e-4, 3))
    model.begin()
    brings = {k: sum(rate**place for place in range(min(k, 3) + 1)) for k in model.lengths}
    chosen = []
    for _ in range(20):
        chosen.append(model.best(batch))
        for _ in range(32):
            model.follow(chosen[-1], brings[chosen[-1]])
    speeds = {k: brings[k] / seconds_of(batch, k, 1e-2, per_row, 1e-4, 3) for k in model.lengths}
    assert np.mean([speeds[k] for k in chosen[-10:]]) > 0.93 * max(speeds.values())
