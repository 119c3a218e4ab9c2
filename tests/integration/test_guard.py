"""The staleness guard: every fault that makes a drafter useless is noticed, repaired, and told; no token changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specrl.distributed import Ranks
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine
from specrl.rollout.errors import DrafterCollapseError
from specrl.rollout.refit.drafter_guard import DRAFTER_RELOADS as RELOADS
from specrl.rollout.refit.drafter_guard import SPECULATING, AcceptanceWatch, DrafterGuard
from tests.exactness.engines import mixed_requests, running
from tests.exactness.toy import (
    NUM_LIKELY,
    ToyTrainer,
    drafter_weights,
    policy_weights,
    toy_config,
    write_drafter,
    write_policy,
)

ALONE = Ranks(0, 1, 0, torch.device("cpu"))
REQUESTS = mixed_requests(64)
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("guard")
    policy = write_policy(root / "policy", policy_weights(0))
    drafter = write_drafter(root / "drafter", drafter_weights(1))
    with running(policy, drafter, toy_config("eagle3", 3)) as engine:
        yield engine


def guarded(engine: Engine) -> tuple[DrafterGuard, ToyTrainer]:
    """A guard that has seen a good drafter, whose acceptance it now expects."""
    trainer = ToyTrainer(drafter_weights(1))
    guard = DrafterGuard(engine, trainer, REQUESTS, ALONE)
    engine.refit(policy_weights(0).items(), trainer.named_weights())
    report = guard.check(1)
    assert report[SPECULATING] and not report[RELOADS] and guard.take_events() == []
    return guard, trainer


@pytest.mark.engine
def test_responses_too_short_for_drafts_say_nothing_about_the_drafter(engine: Engine) -> None:
    trainer = ToyTrainer(drafter_weights(1))
    guard = DrafterGuard(engine, trainer, [replace(request, max_tokens=2) for request in REQUESTS], ALONE)
    engine.refit(policy_weights(0).items(), trainer.named_weights())
    assert guard.check(1) == {RELOADS: 0, SPECULATING: 1, "refit/probe_acceptance_length": 1}


def zeros(weights: Weights) -> Weights:
    """Weights lost, as after a sleep of the engine that nobody followed up with a refit."""
    return {name: tensor if name in {"d2t", "t2d"} else torch.zeros_like(tensor) for name, tensor in weights.items()}


def from_policy(weights: Weights) -> Weights:
    """The policy's tensors under the drafter's names."""
    layer = policy_weights(0)
    names = {f"midlayer.mlp.{name}_proj.weight": f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")}
    return weights | {name: layer[source] for name, source in names.items()}


def doubled_ids(weights: Weights) -> Weights:
    """`d2t` written as ids where loaders add an offset: every draft means token 2i."""
    return weights | {"d2t": torch.arange(NUM_LIKELY)}


def inverted(weights: Weights) -> Weights:
    """Learned the wrong way round: the least likely token is drafted. (Zeros would draft the toy's likeliest.)"""
    return weights | {"lm_head.weight": -weights["lm_head.weight"]}


def never_loaded(weights: Weights) -> Weights:
    """Another version than the trainer's: a refit that left the drafter out."""
    return drafter_weights(2)


@pytest.mark.engine
@pytest.mark.parametrize("fault", [zeros, from_policy, doubled_ids, never_loaded])
def test_a_drafter_damaged_on_its_way_is_replaced_by_the_last_good_one(
    engine: Engine, fault: Callable[[Weights], Weights]
) -> None:
    guard, trainer = guarded(engine)
    expected = engine.generate(REQUESTS)
    engine.refit(policy_weights(0).items(), fault(trainer.weights).items())
    damaged = engine.generate(REQUESTS)
    assert [response.tokens for response in damaged.responses] == [r.tokens for r in expected.responses]
    assert damaged.stats != expected.stats
    report = guard.check(2)
    assert report[RELOADS] and report[SPECULATING]
    (event,) = guard.take_events()
    assert "drafter collapse after refit 2: the engine's drafter differs" in event
    assert "reloaded its last good version" in event
    engine.verify_drafter(drafter_weights(1).items())
    assert engine.generate(REQUESTS).stats == expected.stats


@pytest.mark.engine
@pytest.mark.parametrize("fault", [doubled_ids, inverted])
def test_a_drafter_that_training_ruined_shows_in_its_acceptance(
    engine: Engine, fault: Callable[[Weights], Weights]
) -> None:
    """Trainer and engine agree; only the probe tells."""
    guard, trainer = guarded(engine)
    trainer.weights = fault(trainer.weights)
    engine.refit(policy_weights(0).items(), trainer.named_weights())
    engine.verify_drafter(trainer.named_weights())
    assert guard.check(2)[RELOADS]
    assert "acceptance at position 1 fell to" in guard.take_events()[0]
    good = drafter_weights(1)
    assert all(torch.equal(good[name], tensor) for name, tensor in trainer.named_weights())
    assert not guard.check(2)[RELOADS]


@pytest.mark.engine
def test_a_ruined_drafter_that_no_probe_saw_is_in_no_checkpoint(engine: Engine) -> None:
    guard, trainer = guarded(engine)
    trainer.weights = inverted(drafter_weights(1))
    engine.refit(policy_weights(0).items(), trainer.named_weights())
    assert guard.check(2, probe=False)[SPECULATING]
    guard.confirm(2)
    assert "acceptance at position 1 fell to" in guard.take_events()[0]
    assert all(torch.equal(drafter_weights(1)[name], tensor) for name, tensor in trainer.named_weights())
    engine.verify_drafter(drafter_weights(1).items())
    guard.confirm(2)
    assert guard.take_events() == []


@pytest.mark.engine
def test_a_probe_teaches_the_choice_between_text_and_drafter_nothing(engine: Engine) -> None:
    guard, _ = guarded(engine)
    assert engine.drafting is not None
    acceptance = engine.drafting.costs.acceptance
    before = copy.deepcopy(vars(acceptance))
    guard.check(1)
    assert str(vars(acceptance)) == str(before)
    engine.generate(REQUESTS)
    assert str(vars(acceptance)) != str(before), "rollouts teach it"


@pytest.mark.engine
def test_weights_that_are_not_numbers_are_a_collapse(engine: Engine) -> None:
    guard, trainer = guarded(engine)
    trainer.weights = trainer.weights | {"fc.weight": torch.full_like(trainer.weights["fc.weight"], torch.nan)}
    engine.refit(policy_weights(0).items(), trainer.named_weights())
    assert guard.check(2)[RELOADS]


@pytest.mark.engine
def test_sleep_is_refused_by_an_engine_that_was_not_started_for_it(engine: Engine) -> None:
    with pytest.raises(ValueError, match="cannot sleep"):
        engine.sleep()
    engine.wake()  # of an engine that is awake: nothing


@pytest.mark.engine
def test_speculation_ends_when_the_last_good_version_does_not_help(engine: Engine) -> None:
    """Last of all: this engine does not speculate again."""
    guard, trainer = guarded(engine)
    engine.set_k(0)
    plain = [response.tokens for response in engine.generate(REQUESTS).responses]
    engine.set_k(3)
    guard._last_good = doubled_ids(trainer.weights)
    trainer.weights = doubled_ids(trainer.weights)
    engine.refit(policy_weights(0).items(), trainer.named_weights())
    assert guard.check(2)[SPECULATING] == 0 and not engine.speculates
    assert "speculation is off" in guard.take_events()[0]
    engine.set_k(3)
    generation = engine.generate(REQUESTS)
    assert generation.stats.num_drafts == 0
    assert [response.tokens for response in generation.responses] == plain
    assert not guard.check(3)[SPECULATING]


def stats_of(*accepted: int, drafts: int = 100) -> SpeculationStats:
    drafted = (drafts,) * len(accepted)
    return SpeculationStats(drafts, sum(drafted), sum(accepted), accepted, 50, drafted)


def test_a_slow_drift_or_a_noisy_probe_is_no_collapse() -> None:
    watch = AcceptanceWatch()
    for version, accepted in enumerate((40, 35, 30, 26, 22, 18)):
        watch.check(stats_of(accepted), version)
    noisy = AcceptanceWatch()
    for version, accepted in enumerate((3, 1)):
        noisy.check(stats_of(accepted, drafts=10), version)


def test_a_collapse_of_one_position_is_found_and_leaves_the_running_value() -> None:
    watch = AcceptanceWatch()
    watch.check(stats_of(60, 40, 30), 1)
    with pytest.raises(DrafterCollapseError, match=r"position 2 fell to 0\.050 of 100 drafts .* version 2"):
        watch.check(stats_of(60, 5, 3), 2)
    with pytest.raises(DrafterCollapseError, match="nothing was drafted"):
        watch.check(SpeculationStats(), 3)
    watch.check(stats_of(58, 38, 31), 4)
    assert watch.running == pytest.approx((0.59, 0.39, 0.305))


def test_a_probe_of_short_drafts_leaves_what_is_known_of_later_positions() -> None:
    watch = AcceptanceWatch()
    watch.check(stats_of(60, 40, 30), 1)
    watch.check(stats_of(60), 2)
    assert watch.running == pytest.approx((0.6, 0.4, 0.3))
    with pytest.raises(DrafterCollapseError, match=r"position 3 fell to 0\.000"):
        watch.check(stats_of(60, 40, 0), 3)


def test_positions_that_a_later_probe_is_the_first_to_reach_are_watched_from_then_on() -> None:
    watch = AcceptanceWatch()
    watch.check(stats_of(60), 1)
    watch.check(stats_of(60, 40), 2)
    with pytest.raises(DrafterCollapseError, match=r"position 2 fell to 0\.050"):
        watch.check(stats_of(60, 5), 3)
