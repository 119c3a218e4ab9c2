"""Held-out sets, their scores with confidence intervals, and the curve of validation during training."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specrl.artifacts import CURVE_FOLDER, SetScore, read_curve, write_scores
from specrl.config import Config, ConfigError, dump_config, parse_config
from specrl.data.check import check_data
from specrl.data.held_out import config_of_set
from specrl.data.prompts import PromptSource
from specrl.data.rewards import make_reward
from specrl.distributed import Ranks
from specrl.keys import run_keys
from specrl.metrics import find_metric
from specrl.models.tiny import character_tokenizer
from specrl.tracking import Silent
from specrl.tracking.tracker import check_names
from specrl.validation.answering import held_out_sets
from specrl.validation.scores import SetResponses, bootstrap, pass_at, pass_sizes, score_set, wilson
from specrl.validation.validation import Validation

TOKENIZER = character_tokenizer(2048)


def config_with(sets: dict[str, Any] | None = None, **sections: Any) -> Config:
    validate = {"num_prompts": 6, "sets": sets or {}, **sections.pop("validate", {})}
    return parse_config({"name": "run", "validate": validate, **sections})


def scored(rewards: list[list[float]], correct_reward: float = 1.0) -> SetScore:
    values = np.array(rewards)
    lengths = np.arange(values.size, dtype=np.int64).reshape(values.shape)
    return score_set(4, "sums", SetResponses(values, lengths, lengths >= values.size - 1), correct_reward, 1.5)


def test_pass_at_k_is_the_share_of_the_draws_that_have_a_right_sample() -> None:
    for num_right in range(6):
        samples = [index < num_right for index in range(5)]
        for size in range(1, 6):
            draws = list(combinations(samples, size))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at(np.array([num_right]), 5, size)[0] == pytest.approx(expected)


def test_scores_are_means_over_prompts_and_samples() -> None:
    score = scored([[1, 0, 0, 1], [0, 0, 0, 0], [0.5, 1, 1, 1]])
    assert score.accuracy == pytest.approx(5.5 / 12)
    assert score.avg_at_k == pytest.approx(5 / 12)
    assert score.pass_at_k == pytest.approx(2 / 3)
    assert list(score.pass_at) == [1, 2, 4] == pass_sizes(4)
    assert score.pass_at[1] == pytest.approx(score.avg_at_k)
    assert score.pass_at[2] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert (score.response_length_mean, score.response_length_max) == (5.5, 11)
    assert score.truncated_fraction == pytest.approx(1 / 12)
    assert all(low <= getattr(score, name) <= high for name, (low, high) in score.ci.items())
    assert scored([[1, 0, 0, 1]], correct_reward=0.0).avg_at_k == 1


def test_intervals_hold_the_true_mean_as_often_as_they_say() -> None:
    generator = np.random.default_rng(3)
    held = {"wilson": 0, "bootstrap": 0}
    for _ in range(200):
        chances = generator.beta(2, 3, size=60)  # every prompt has its own difficulty; the mean chance is 0.4
        low, high = wilson(int((generator.random(60) < chances).sum()), 60)
        held["wilson"] += low <= 0.4 <= high
        low, high = bootstrap({"": generator.binomial(4, chances) / 4})[""]
        held["bootstrap"] += low <= 0.4 <= high
    assert all(0.9 * 200 <= count <= 0.995 * 200 for count in held.values()), held


def test_an_interval_does_not_vanish_where_every_response_is_right() -> None:
    low, high = scored([[1.0], [1.0], [1.0], [1.0]]).ci["accuracy"]
    assert low < 0.6
    assert high == 1


def test_every_score_has_a_defined_metric() -> None:
    metrics = scored([[1, 0, 1]]).metrics()
    check_names(metrics)
    assert metrics["validation/sums/accuracy"] == pytest.approx(2 / 3)
    assert {"validation/sums/pass_at_2", "validation/sums/accuracy_low"} <= set(metrics)
    found = find_metric("validation/any-1.set_2/accuracy")
    assert found is not None
    assert found.better == "higher"
    assert find_metric("validation/sums/unknown") is None


def test_the_only_set_is_by_default_the_one_that_validate_measures() -> None:
    config = config_with()
    source = PromptSource(config, TOKENIZER)
    [chosen] = held_out_sets(config, source)
    assert (chosen.name, chosen.samples_per_prompt) == ("held-out", 1)
    assert chosen.prompts == source.held_out(6)
    assert chosen.config.sampling == config.sampling


def test_sets_have_problems_and_sampling_of_their_own(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {number % 4}", "answer": number} for number in range(8)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    harder = {"name": "worked_sums", "parameters": {"terms": [6]}}
    config = config_with(
        {
            "file": {"path": str(path), "reward": "exact_match", "temperature": 0.0},
            "harder": {"generators": [harder], "num_prompts": 5, "samples_per_prompt": 3, "top_p": 0.9},
        }
    )
    assert parse_config(json.loads(dump_config(config))) == config
    assert config.validate_.first_set == "file"
    check_data(config)
    file, sums = held_out_sets(config, PromptSource(config, TOKENIZER))
    assert [prompt.text for prompt in file.prompts] == [f"question {number}" for number in range(4)]
    assert (file.config.sampling.temperature, make_reward(file.config.data)(file.prompts[0], "Answer: 4")) == (0, 1)
    assert all(len(prompt.metadata["entry"]["terms"]) == 6 for prompt in sums.prompts)
    assert (len(sums.prompts), sums.samples_per_prompt, sums.config.sampling.top_p) == (5, 3, 0.9)
    assert make_reward(sums.config.data)(sums.prompts[0], f"Answer: {sums.prompts[0].answer}") == 1


def test_problems_of_a_set_are_never_trained_on() -> None:
    few = {"name": "worked_sums", "parameters": {"terms": [2], "high": 9, "large_share": 0}}
    data = {"generators": [few], "validation_fraction": 0.3}
    source = PromptSource(config_with({"own": {"generators": [few], "num_prompts": 12}}, data=data), TOKENIZER)
    trained = {prompt.text for step in range(20) for prompt in source.batch(step)}
    assert trained.isdisjoint(prompt.text for prompt in source.validation("own"))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"a": {"path": "x.jsonl"}}, r'validate\.sets\.a\.reward = "task".*math_verify'),
        ({"a": {"path": "x.jsonl", "generators": [{"name": "worked_sums"}]}}, "one or the other"),
        ({"a": {"temperature": 0, "samples_per_prompt": 2}}, "greedy responses to one prompt are all the same"),
        ({"a": {"temperature": 2.5}}, r"temperature = 2\.5: it must be 0 \(greedy\), or from 0\.01 to 2"),
        ({"a b": {}}, r"validate\.sets\.a b"),
        ({"a": {"samples": 3}}, r"validate\.sets\.a\.samples: unknown key; allowed here: path, generators"),
    ],
)
def test_a_wrong_set_is_one_line(sets: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        config_with(sets)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"path": "missing.jsonl"}, r"validate\.sets\.a: data file missing\.jsonl does not exist"),
        ({"generators": [{"name": "worked_sum"}]}, r"validate\.sets\.a: .*did you mean worked_sums"),
        ({"path": "two.jsonl", "num_prompts": 3}, r"validate\.sets\.a\.num_prompts = 3, but two\.jsonl has only 2"),
        ({"reward": "exact"}, r'data\.reward = "exact"'),
    ],
)
def test_a_set_without_its_problems_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    with pytest.raises(ConfigError, match=message):
        check_data(config_with({"a": {"reward": "exact_match", **chosen}}))


def test_a_set_is_answered_under_the_settings_of_the_run_but_for_its_own() -> None:
    config = config_with({"greedy": {"temperature": 0}}, sampling={"top_k": 7, "max_response_tokens": 30})
    sampling = config_of_set(config, "greedy").sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_response_tokens) == (0, 7, 30)


def test_the_train_stage_depends_on_the_sets_only_where_it_validates(tmp_path: Path) -> None:
    def train_key(**validate: Any) -> str:
        return run_keys(config_with(validate=validate), "code")["train"]

    assert train_key(num_prompts=9) == train_key()
    assert train_key(every=2, speed_repeats=1) == train_key(every=2) != train_key()
    assert train_key(every=2, num_prompts=9) != train_key(every=2)
    path, moved = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for file in (path, moved):
        file.write_text('{"prompt": "a", "answer": 1}\n')

    def with_file(file: Path) -> str:
        return train_key(every=2, sets={"a": {"path": str(file), "reward": "exact_match"}})

    first = with_file(path)
    assert with_file(moved) == first
    path.write_text('{"prompt": "b", "answer": 1}\n')
    assert with_file(path) != first


def validation(config: Config, stage_dir: Path) -> Validation:
    ranks = Ranks(0, 1, 0, torch.device("cpu"))
    engine: Any = None  # nothing is generated
    return Validation(config, ranks, engine, PromptSource(config, TOKENIZER), None, Silent(), stage_dir)


def test_the_first_the_last_and_every_nth_policy_are_validated_once(tmp_path: Path) -> None:
    config = config_with(validate={"every": 3}, train={"num_steps": 8})
    found = validation(config, tmp_path)
    assert [step for step in range(9) if found.is_due(step)] == [0, 3, 6, 8]
    for step in (0, 3, 6):
        write_scores(tmp_path, step, [scored([[1.0]]).model_copy(update={"step": step})])
    found.restore(5)  # a checkpoint of step 5 is the newest: what came after it is run again
    assert [score.step for score in found.curve] == [0, 3]
    assert [score.step for score in read_curve(tmp_path)] == [0, 3]
    assert len(list((tmp_path / CURVE_FOLDER).iterdir())) == 2
    assert [step for step in range(9) if found.is_due(step)] == [6, 8]


def test_without_every_nothing_is_validated_and_no_set_is_read(tmp_path: Path) -> None:
    config = config_with({"a": {"path": str(tmp_path / "missing.jsonl"), "reward": "exact_match"}})
    assert not any(validation(config, tmp_path).is_due(step) for step in range(9))
