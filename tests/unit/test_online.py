"""The drafter's online training: one constant learning rate, in the steps and in idle time."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows.preflight import doubts
from specrl.config import ConfigError, parse_config
from specrl.loop import Trainer
from specrl.training.drafter.spot import SpotTraining
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features
from tests.unit.test_drafter import arithmetic_features, assert_equal_state, make_drafter, write_policy


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


def text_of(drafter: Drafter) -> list[Features]:
    """The features of 32 responses."""
    return [arithmetic_features(drafter, number) for number in range(4)]


def update(drafter: Drafter, spot: SpotTraining | None, text: list[Features]) -> dict[str, float]:
    trainer = SimpleNamespace(drafter=drafter, spot=spot, config=SimpleNamespace(drafter=drafter.config))
    return Trainer.update_drafter(cast(Any, trainer), list(text))


def test_the_drafter_learns_in_each_step_at_a_constant_rate(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir, online_lr=5e-3)
    text, losses = text_of(drafter), []
    for _ in range(6):
        losses.append(update(drafter, None, text)["loss"])
        assert drafter.optimizer.param_groups[0]["lr"] == 5e-3
    assert losses[-1] < 0.9 * losses[0]


def test_the_drafter_learns_from_every_nth_step_and_from_the_last_one(policy_dir: Path) -> None:
    settings = {"name": "run", "drafter": {"update_every": 3}, "train": {"num_steps": 8}}
    trainer = SimpleNamespace(config=parse_config(settings))
    learns = [step for step in range(8) if Trainer.updates_drafter(cast(Any, trainer), step)]
    assert learns == [2, 5, 7]
    drafter = make_drafter(policy_dir)
    before = copy.deepcopy(drafter.state_dict())
    assert update(drafter, None, []) == {}  # without features
    assert_equal_state(drafter.state_dict(), before)
    with pytest.raises(ConfigError, match=r"drafter\.update_every = 3 must be 1"):
        parse_config(settings | {"bubbles": {"use": "train_drafter"}})


def test_what_is_trained_in_idle_time_takes_the_place_of_the_steps_update(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir, online_lr=5e-3)
    spot, text = SpotTraining(drafter), text_of(drafter)
    update(drafter, spot, text)
    assert spot.work(lambda: False)
    trained = copy.deepcopy(drafter.state_dict())
    found = update(drafter, spot, text)
    assert found["loss"] > 0 and found["num_tokens"] > 0
    assert_equal_state(drafter.state_dict(), trained)


def test_a_frozen_drafter_is_measured_and_stays_as_it_is(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir, online_lr=0.0)
    before = copy.deepcopy(drafter.state_dict())
    assert update(drafter, None, text_of(drafter))["loss"] > 0
    assert_equal_state(drafter.state_dict(), before)


@pytest.mark.parametrize("rate", [1e-3, 1e-8])
def test_a_rate_that_is_far_off_is_warned_of(rate: float) -> None:
    settings: dict[str, Any] = {"name": "run", "drafter": {"online_lr": rate}}
    (line,) = doubts(parse_config(settings))
    assert line.startswith(f"drafter.online_lr = {rate:g} is constant and far from the default")
    assert doubts(parse_config({**settings, "speculation": {"method": "ngram"}})) == []


@pytest.mark.parametrize("rate", [0.0, 2e-5, 1e-4, 3e-4])
def test_a_rate_that_has_been_of_use_is_not_warned_of(rate: float) -> None:
    assert doubts(parse_config({"name": "run", "drafter": {"online_lr": rate}})) == []
