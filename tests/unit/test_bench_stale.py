"""The drafters that `specrl bench drafter` pretrains and observes beside each other."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specrl.bench.drafter.comparison import prompts_of
from specrl.bench.drafter.observed import ObservedDrafter, frozen_and_online
from specrl.config import parse_config
from specrl.data.prompts import PromptSource
from specrl.models.tiny import character_tokenizer
from tests.unit.test_drafter import ALONE, make_drafter, make_features, write_policy


def weights(observed: ObservedDrafter) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in observed.drafter.model.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_stale_drafters_keep_their_distance_from_the_one_that_is_trained(tmp_path: Path) -> None:
    policy_dir = write_policy(tmp_path / "policy")
    make_drafter(policy_dir).save(tmp_path / "drafter", policy_version=0)
    config = parse_config({"name": "run", "drafter": {"online_lr": 1e-2}})
    every = frozen_and_online("task", tmp_path / "drafter", policy_dir, config, ALONE, stale=True)
    frozen, zeroed, behind, online = every
    trained = [weights(online)]
    for step in range(3):
        for observed in every:
            observed.follow([make_features(observed.drafter, [(3, 9), (7, 4)], seed=step)], config)
        trained.append(weights(online))
        assert same(weights(behind), trained[step])
        assert same(weights(frozen), trained[0]) and not same(trained[step], trained[step + 1])
    assert not any(tensor.any() for tensor in weights(zeroed).values())
    assert [len(observed.lengths) for observed in every] == [3] * 4
    assert behind.lengths[:2] == frozen.lengths[:2]
    assert [observed.name for observed in every][1:3] == ["task, zeroed", "task, one step behind"]


def test_a_drafter_of_both_is_pretrained_on_half_of_each() -> None:
    config = parse_config({"name": "run"})
    source = PromptSource(config, character_tokenizer(2048))
    off_task, task, both = (prompts_of(name, 6, config, source) for name in ("off-task", "task", "both"))
    assert task == source.pretraining(6) and not {prompt.text for prompt in off_task} & {item.text for item in task}
    assert both == [*off_task[:3], *task[:3]]
