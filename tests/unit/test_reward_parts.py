"""Rewards of several parts: their sum, what is stored of each, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flows.cli import invoke
from specrl.algorithms.advantages import group_advantages
from specrl.config import Config, ConfigError, DataConfig, dump_config, parse_config
from specrl.config.algorithms import ADVANTAGES
from specrl.data.problems import Prompt
from specrl.data.rewards.functions import make_rewards
from specrl.data.rewards.pool import FailureTally, RewardError, RewardPool, Scores, refuse_failure
from specrl.data.rewards.trial import doubtful_references
from specrl.distributed import Ranks
from specrl.keys import named_files, run_keys
from specrl.metrics import OF_PARTS, find_metric
from specrl.schemas import Rollout, read_rollouts, write_rollouts
from specrl.training.rollouts import RolloutBatch

BODY = """
import time

def form(prompt, response, answer):
    if response == "raise":
        raise ValueError("no form")
    if response == "hang":
        time.sleep(1000)
    return None if response == "skip" else float(response.startswith("Answer"))

def broken(prompt, response, answer):
    raise RuntimeError("always")
"""
ALONE = Ranks(0, 1, 0, torch.device("cpu"))
PARTS: list[dict[str, Any]] = [{"name": "exact_match"}, {"name": "formal_rewards:form", "weight": 0.25}]
GDPO = ADVANTAGES.choose("gdpo")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("parts")
    (found / "formal_rewards.py").write_text(BODY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(found))
        patch.chdir(found)
        yield found


def data(reward: Any = PARTS, **settings: Any) -> DataConfig:
    return DataConfig.model_validate({"source": "file", "path": "rows.jsonl", "reward": reward, **settings})


def config(reward: Any = PARTS, **train: Any) -> Config:
    section = {"source": "file", "path": "rows.jsonl", "reward": reward}
    return parse_config({"name": "x", "data": section, "train": train})


def scored(section: DataConfig, responses: list[str], answer: str = "42") -> Scores:
    pool = RewardPool(section)
    try:
        scoring = pool.begin(section)
        for number, response in enumerate(responses):
            scoring.submit(number, Prompt(number, "Q", [1], answer), response)
        return scoring.wait()
    finally:
        pool.close()


def test_a_reward_is_the_weighted_sum_of_its_parts() -> None:
    found = scored(data(), ["Answer: 42", "42", "Answer: 41", "no"])
    assert found.parts == [[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    assert found.rewards == [1.25, 1.0, 0.25, 0.0] and not found.failures


def test_a_part_that_fails_or_leaves_out_costs_nothing_of_the_others() -> None:
    """A response whose process ends or hangs has lost all of its parts."""
    section = data(reward_on_failure=-1.0, reward_timeout_s=6.0)
    found = scored(section, ["Answer: 42", "raise", "skip", "hang", "42"])
    assert found.parts[:2] == [[1.0, 1.0], [0.0, -1.0]] and found.parts[3:] == [[-1.0, -1.0], [1.0, 0.0]]
    assert found.parts[2][0] == 0.0 and math.isnan(found.parts[2][1])
    assert [failure.reason for failure in found.failures] == [
        "raised ValueError: no form (in form)",
        "took longer than data.reward_timeout_s = 6",
    ]
    assert [failure.parts for failure in found.failures] == [(1,), (0, 1)]
    assert math.isnan(found.rewards[2]) and [*found.rewards[:2], *found.rewards[3:]] == [1.25, -0.25, -1.25, 1.0]


def test_a_part_that_is_only_measured_leaves_no_response_out() -> None:
    found = scored(data([{"name": "exact_match"}, {"name": "formal_rewards:form", "weight": 0}]), ["skip", "42"])
    assert math.isnan(found.parts[0][1]) and found.rewards == [0.0, 1.0]


def test_a_part_that_is_left_out_counts_as_its_groups_mean_wherever_the_group_was_generated() -> None:
    chosen = config([{"name": "exact_match"}, {"name": "formal_rewards:form", "weight": 0.25}])
    batch = batch_of([[(1, 1), (0, -1), (0, math.nan)], [(math.nan, 1), (math.nan, 0), (math.nan, 0)]], chosen)
    assert [part.tolist() for part in batch.reward_parts.values()] == [[1, 0, 0, 0, 0, 0], [1, -1, 0, 1, 0, 0]]
    assert batch.rewards.tolist() == [1.25, -0.25, 0.0, 0.25, 0.0, 0.0]
    assert [row.reward for row in batch.held.values()] == batch.rewards.tolist()
    assert batch.held[2].reward_parts == {"exact_match": 0.0, "form": 0.0}


@pytest.mark.parametrize("reward", [0.1, 0.7])
def test_a_reward_that_is_left_out_makes_no_signal_where_all_others_are_equal(reward: float) -> None:
    rows = [rollout(0, sample, given, None) for sample, given in enumerate([reward] * 3 + [math.nan])]
    batch = RolloutBatch.gather(ALONE, rows, data=config("exact_match").data)
    assert batch.rewards.tolist() == [reward] * 4


def test_a_part_that_fails_on_every_response_stops_the_run() -> None:
    section = data([{"name": "exact_match"}, {"name": "formal_rewards:broken", "weight": 0.5}])
    found = scored(section, ["42", "41"])
    assert found.rewards == [1.0, 0.0]
    tally = FailureTally.merge([FailureTally.of(found.failures), FailureTally()])
    refuse_failure(tally, 3, section)
    with pytest.raises(RewardError, match=r"exact_match \+ 0\.5 x formal_rewards:broken.* failed on all 2 responses"):
        refuse_failure(tally, 2, section)


def rollout(prompt: int, sample: int, reward: float, parts: dict[str, float] | None) -> Rollout:
    common = (0, 0, prompt, sample, 0, 0, 0, [1], [2, 3], [-1.0, -1.0], "", "", "stop")
    return Rollout(*common, reward=reward, reward_parts=parts)


def test_parts_are_stored_by_name_and_read_again(tmp_path: Path) -> None:
    rows = [rollout(0, 0, 1.25, {"exact_match": 1.0, "form": 1.0}), rollout(0, 1, 0.5, None)]
    write_rollouts(tmp_path / "rank-0000.arrow", rows)
    assert read_rollouts(tmp_path / "rank-0000.arrow") == rows


def batch_of(groups: list[list[tuple[float, float]]], chosen: Config) -> RolloutBatch:
    names, weights = chosen.data.part_names, chosen.data.part_weights  # a part is NaN where it is left out
    rows = [
        rollout(prompt, sample, weights[0] * one + weights[1] * two, dict(zip(names, (one, two), strict=True)))
        for prompt, group in enumerate(groups)
        for sample, (one, two) in enumerate(group)
    ]
    batch = RolloutBatch.gather(ALONE, rows, data=chosen.data)
    batch.assign_advantages(chosen)
    return batch


def test_gdpo_tells_apart_what_has_the_same_sum() -> None:
    """Of a group with the parts (1, 0), (0, 1), (0, 0), (0, 0), by hand, and another one that teaches nothing."""
    chosen = config([{"name": "exact_match"}, {"name": "formal_rewards:form", "weight": 2.0}], algorithm="gdpo")
    batch = batch_of([[(1, 0), (0, 1), (0, 0), (0, 0)], [(1, 1), (1, 1), (1, 1), (1, 1)]], chosen)
    # A part with the values 1, 0, 0, 0 has the mean 1/4 and the deviation sqrt(3)/4: normalised 3, -1, -1, -1 over
    # sqrt(3). With weights 1 and 2 the sums are 1, 5, -3, -3, over sqrt(3); their squares are 44/3, over 8 responses.
    scale = math.sqrt(44 / 3 / 8)
    expected = [value / math.sqrt(3) / scale for value in (1, 5, -3, -3)]
    assert batch.advantages.tolist() == pytest.approx([*expected, 0, 0, 0, 0], rel=1e-5)
    assert batch.advantages[4:].tolist() == [0.0] * 4
    assert [batch.held[number].advantage for number in range(8)] == batch.advantages.tolist()


def test_gdpo_is_what_trl_normalises_and_then_sums() -> None:
    """TRL's `multi_objective_aggregation = "normalize_then_sum"` but for its unbiased deviation, which scales all."""
    random = np.random.default_rng(0)
    parts, weights = random.random((2, 3, 4)), np.array([1.0, 0.3])
    normal = (parts - parts.mean(2, keepdims=True)) / parts.std(2, keepdims=True, ddof=1)
    summed = (normal * weights[:, None, None]).sum(0)
    wanted = (summed - summed.mean()) / summed.std(ddof=1)
    groups = np.repeat(np.arange(3), 4).tolist()
    columns = [part.reshape(-1).tolist() for part in parts]
    found = group_advantages([0.0] * 12, groups, GDPO, columns, weights.tolist())
    assert found == pytest.approx((wanted.reshape(-1) * math.sqrt(12 / 11)).tolist(), rel=1e-4)


def test_parts_that_differ_are_a_signal_for_gdpo_alone() -> None:
    """Their sums are equal, so that grpo learns nothing from them and dynamic sampling drops them."""
    weighted = [{"name": "exact_match"}, {"name": "formal_rewards:form", "weight": 0.5}]
    same_sum: list[list[tuple[float, float]]] = [[(0.5, 1), (1, 0), (0.5, 1)], [(1, 1), (1, 1), (1, 1)]]
    for algorithm, missing in (("gdpo", 1), ("grpo", 2)):
        chosen = config(weighted, prompts_per_step=2, refill_rounds=1, advantage=algorithm)
        batch = batch_of(same_sum, chosen)
        assert batch.num_missing(chosen) == missing
        assert bool(batch.advantages.any()) == (algorithm == "gdpo")
    only_measured = config([PARTS[0], {**PARTS[1], "weight": 0}], prompts_per_step=2, refill_rounds=1, advantage="gdpo")
    assert batch_of([[(1, 0), (1, 1)], [(0, 1), (1, 1)]], only_measured).num_missing(only_measured) == 1


def test_the_same_parts_have_metrics(folder: Path) -> None:
    chosen = config()
    batch = batch_of([[(1, 0), (0, 1)], [(1, 1), (1, 0)]], chosen)
    means = {name: float(column.mean()) for name, column in batch.reward_parts.items()}
    assert means == {"exact_match": 0.75, "form": 0.5}
    found = find_metric("reward/part/form")
    assert found is not None and found.name == f"{OF_PARTS}NAME"


def test_a_name_alone_stays_a_name_and_parts_count_by_their_files(folder: Path) -> None:
    assert json.loads(dump_config(config("exact_match")))["data"]["reward"] == "exact_match"
    assert config([{"name": "exact_match"}]) == config("exact_match")
    chosen = config()
    assert parse_config(json.loads(dump_config(chosen))) == chosen
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    before, files = run_keys(chosen, "code"), named_files(chosen)
    try:
        (folder / "formal_rewards.py").write_text(BODY + "# changed\n")
        assert run_keys(chosen, "code")["train"] != before["train"]
        assert [key for key in files if files[key] != named_files(chosen)[key]] == ["data.reward"]
    finally:
        (folder / "formal_rewards.py").write_text(BODY)


@pytest.mark.parametrize(
    ("reward", "train", "message"),
    [
        ([], {}, r"^data\.reward = \[\]: "),
        ([{"weight": 2}], {}, r"^data\.reward\.0\.name: required, but not given$"),
        ([{"name": "length", "wieght": 2}], {}, r"wieght: unknown key; allowed here: .*; perhaps weight$"),
        ([{"name": "task"}, {"name": "task"}], {}, r"^data\.reward: several parts are called task: give them a label"),
        ("exact_match", {"algorithm": "gdpo"}, r'^train\.advantage = "gdpo" .*"exact_match" has none: give a list'),
        (PARTS, {"advantage": "gdpo", "overlong_window": 0.2}, r"^train\.overlong_window = 0\.2 with train\.advantage"),
        (
            PARTS,
            {"stop_when": {"metric": "reward/part/from", "above": 1}},
            r"allowed: reward/part/exact_m.*form$",
        ),
        ("task", {"stop_when": {"metric": "reward/part/x", "above": 1}}, r"data\.reward has no parts$"),
    ],
)
def test_what_makes_no_sense_is_one_line(reward: Any, train: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        config(reward, **train)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"name": "length"}, r"^data\.reward\.length\.target: required, but not given$"),
        ({"name": "length", "parameters": {"target": 5, "limit": 5}}, r"limit = 5: it must be above target = 5$"),
        ({"name": "length", "parameters": {"tokens": 5}}, r"data\.reward\.length\.tokens: unknown key; allowed here: "),
        ({"name": "math_verify", "parameters": {"strict": True}}, r"data\.reward\.math_verify\.strict: unknown key"),
        (
            {"name": "formal_rewards:form", "parameters": {"a": 1}},
            r":form\" takes no parameters: leave a out$",
        ),
    ],
)
def test_wrong_parameters_are_refused_before_anything_runs(part: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rewards(data([part]))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [({"target": 4}, [1.0, 1.0, 0.0, 0.0]), ({"target": 4, "limit": 8}, [1.0, 1.0, 0.75, 0.0])],
)
def test_length_falls_beyond_its_target(parameters: dict[str, int], expected: list[float]) -> None:
    [reward] = make_rewards(data([{"name": "length", "parameters": parameters}]))
    prompt = Prompt(0, "Q", [], "42")
    assert [reward(prompt, "x" * length) for length in (0, 4, 5, 8)] == expected
    assert reward(prompt, "<think>xxx</think>") == 0.0  # thoughts count


def test_references_are_scored_against_the_whole_sum() -> None:
    parts = [*PARTS, {"name": "length", "weight": 0.5, "parameters": {"target": 100}}]
    right = [(Prompt(0, "Q", [], "42"), "Answer: 42"), (Prompt(0, "R", [], "43"), "Answer: 43")]
    assert doubtful_references(config(parts), right) == []
    [line] = doubtful_references(config(parts), [*right, (Prompt(0, "S", [], "44"), "It is said: 44")])
    assert line.startswith("1 of the 3 references looked at do not earn 1.75 by data.reward = 'exact_match + 0.25 x ")
    assert re.search(r"\(mean of its parts: exact_match [\d.]+, form 0\.666667, length 1\); the first one: '44'$", line)


def test_the_command_and_the_dry_run_show_the_parts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"prompt": f"{number} + 1 =", "answer": str(number + 1)}) for number in range(400)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "parts.toml").write_text(
        'name = "parts"\n[train]\nalgorithm = "gdpo"\n[data]\nsource = "file"\npath = "rows.jsonl"\n'
        '[[data.reward]]\nname = "exact_match"\n[[data.reward]]\nname = "formal_rewards:form"\nweight = 0.25\n'
        '[[data.reward]]\nname = "length"\nweight = 0.5\nparameters = { target = 20 }\n[validate]\nnum_prompts = 20\n'
    )
    (folder / "response.txt").write_text("Answer: nothing")
    assert invoke(["reward", "parts.toml", "--response", "response.txt", "--json", "out.json"]) == 0
    assert "parts: exact_match 0, form 1, length 1" in capsys.readouterr().out
    found = json.loads((folder / "out.json").read_text())
    assert (found["score"], found["parts"]) == (0.75, {"exact_match": 0.0, "form": 1.0, "length": 1.0})
    assert invoke(["run", "parts.toml", "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "data.reward = exact_match + 0.25 x formal_rewards:form + 0.5 x length (target = 20)" in printed
    assert "train.advantage = gdpo" in printed
