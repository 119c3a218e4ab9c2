"""Held-out sets, their scores with confidence intervals, and the curve of validation during training."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specrl.artifacts import CURVE_FOLDER, SetScore, read_curve, write_json, write_scores, write_text
from specrl.config import (
    Config,
    ConfigError,
    DataConfig,
    GeneratorConfig,
    StopConfig,
    ValidationSetConfig,
    dump_config,
    parse_config,
)
from specrl.data import check
from specrl.data.check import check_data
from specrl.data.held_out import config_of_set
from specrl.data.prompts import PromptSource
from specrl.data.rewards.functions import make_rewards
from specrl.distributed import Ranks
from specrl.keys import run_keys
from specrl.lineage.history import adopt_history, kept_checkpoints
from specrl.lineage.record import Continuation, saved_steps
from specrl.metrics import find_metric
from specrl.models.tiny import character_tokenizer
from specrl.stages.validate import step_speedup
from specrl.tracking.tracker import Tracker
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.validation.answering import held_out_sets
from specrl.validation.scores import SetResponses, interval, pass_at, score_set
from specrl.validation.stopping import EarlyStop
from specrl.validation.validation import Validation
from tests.unit.test_checkpoint import ToyPolicy

TOKENIZER = character_tokenizer(2048)
ALONE = Ranks(0, 1, 0, torch.device("cpu"))


def config_with(sets: dict[str, Any] | None = None, **sections: Any) -> Config:
    validate = {"num_prompts": 6, "sets": sets or {}, **sections.pop("validate", {})}
    return parse_config({"name": "run", "validate": validate, **sections})


def scored(rewards: list[list[float]], correct_reward: float = 1.0, step: int = 4, measure: str = "") -> SetScore:
    values = np.array(rewards)
    lengths = np.arange(values.size, dtype=np.int64).reshape(values.shape)
    sizes = ValidationSetConfig(samples_per_prompt=values.shape[1]).pass_sizes
    responses = SetResponses(values, lengths, lengths >= values.size - 1)
    return score_set(step, "sums", responses, sizes, correct_reward, 1.5, decode_steps_per_token=0.5, measure=measure)


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
    assert list(score.pass_at) == [1, 2, 4]
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
        low, high = interval((generator.random(60) < chances).astype(np.float64))
        held["wilson"] += low <= 0.4 <= high
        low, high = interval(generator.binomial(4, chances) / 4)
        held["bootstrap"] += low <= 0.4 <= high
    assert all(0.9 * 200 <= count <= 0.995 * 200 for count in held.values()), held


def test_an_interval_does_not_vanish_where_every_response_is_right() -> None:
    low, high = scored([[1.0], [1.0], [1.0], [1.0]]).ci["accuracy"]
    assert low < 0.6
    assert high == 1


def test_every_score_has_a_defined_metric() -> None:
    metrics = scored([[1, 0, 1]]).metrics()
    Tracker().log_metrics(metrics)
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
    assert (chosen.name, chosen.settings.samples_per_prompt) == ("held-out", 1)
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
    assert (file.config.sampling.temperature, make_rewards(file.config.data)[0](file.prompts[0], "Answer: 4")) == (0, 1)
    assert all(len(prompt.metadata["entry"]["terms"]) == 6 for prompt in sums.prompts)
    assert (len(sums.prompts), sums.settings.samples_per_prompt, sums.config.sampling.top_p) == (5, 3, 0.9)
    assert make_rewards(sums.config.data)[0](sums.prompts[0], f"Answer: {sums.prompts[0].answer}") == 1


def test_problems_of_a_set_are_never_trained_on() -> None:
    few = {"name": "worked_sums", "parameters": {"terms": [2], "high": 9, "large_share": 0}}
    data = {"generators": [few], "validation_fraction": 0.3}
    source = PromptSource(config_with({"own": {"generators": [few], "num_prompts": 12}}, data=data), TOKENIZER)
    trained = {prompt.text for step in range(20) for prompt in source.batch(step)}
    assert trained.isdisjoint(prompt.text for prompt in source.validation("own"))


def test_a_set_whose_problems_are_trained_on_is_said_to_be_one(tmp_path: Path) -> None:
    for name, numbers in (("train", range(20)), ("other", range(15, 30))):
        rows = [{"prompt": f"question {number}", "answer": number} for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": "file", "path": str(tmp_path / "train.jsonl"), "reward": "exact_match"}
    sizes = {"validate": {"num_prompts": 2}, "train": {"prompts_per_step": 4}}
    config = config_with({"other": {"path": str(tmp_path / "other.jsonl")}, "held-out": {}}, data=data, **sizes)
    notes = PromptSource(config, TOKENIZER).check().notes  # the last two of the twenty rows are held out
    assert notes == ["validate.sets.other: 3 of its 15 problems are trained on too"]


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
        ({"path": "texts"}, r"validate\.sets\.a: data file texts is a folder without data files"),
        ({"generators": [{"name": "worked_sum"}]}, r"validate\.sets\.a: .*did you mean worked_sums"),
        ({"path": "two.jsonl", "num_prompts": 3}, r"validate\.sets\.a\.num_prompts = 3, but two\.jsonl has only 2"),
        ({"reward": "exact"}, r'validate\.sets\.a: data\.reward = "exact"'),
    ],
)
def test_a_set_without_its_problems_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    Path("texts").mkdir()
    with pytest.raises(ConfigError, match=message):
        check_data(config_with({"a": {"reward": "exact_match", **chosen}}))


def test_held_out_problems_are_counted_before_a_start_unless_drawing_them_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"name": "worked_sums", "parameters": {"terms": [2], "high": 9, "large_share": 0}}  # 100 problems in all
    of_generators = config_with(data={"generators": [few]}, validate={"num_prompts": 200})
    of_a_set = config_with({"a": {"generators": [few], "num_prompts": 200}})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {number}", "answer": 1}) + "\n" for number in range(90)))
    file = {"source": "file", "path": str(path), "reward": "exact_match"}
    of_a_file = config_with({"a": {"generators": [few], "reward": "task"}}, data=file, validate={"num_prompts": 10})
    for config in (of_generators, of_a_set):
        with pytest.raises(ConfigError, match=r"have only .* distinct held-out problems of the 200 asked for"):
            check_data(config)
    monkeypatch.setattr(check, "PATIENCE_S", 0.0)
    check_data(of_generators)
    check_data(of_a_set)
    with pytest.raises(ConfigError, match="has only 9 distinct held-out rows of the 10 asked for"):
        check_data(of_a_file)


def test_a_set_is_answered_under_the_settings_of_the_run_but_for_its_own() -> None:
    config = config_with({"greedy": {"temperature": 0}}, sampling={"top_k": 7, "max_response_tokens": 30})
    sampling = config_of_set(config, "greedy").sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_response_tokens) == (0, 7, 30)


def test_the_data_of_a_set_are_those_of_a_valid_configuration() -> None:
    """The processes of the rewards read them again."""
    few = GeneratorConfig(name="worked_sums")
    files = {
        "source": "file",
        "path": ["a.jsonl", "b.jsonl"],
        "weights": [1, 2],
        "overlong": "error",
        "reward": "length",
    }
    sets = {"c": {"path": "c.jsonl"}, "d": {"generators": [few]}}
    config = config_with(sets, data=files)
    for name in sets:
        DataConfig.model_validate_json(config_of_set(config, name).data.model_dump_json())


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
    engine: Any = None  # nothing is generated
    return Validation(config, ALONE, engine, PromptSource(config, TOKENIZER), None, Tracker(), stage_dir)


def due(found: Validation) -> list[int]:
    return [step for step in range(9) if found.is_due(step, last=step == 8)]


def test_the_first_the_last_and_every_nth_policy_are_validated_once(tmp_path: Path) -> None:
    config = config_with(validate={"every": 3}, train={"num_steps": 8})
    found = validation(config, tmp_path)
    assert due(found) == [0, 3, 6, 8]
    for step in (0, 3, 6):
        write_scores(tmp_path, step, [scored([[1.0]], step=step)])
    found.restore(5)  # a checkpoint of step 5 is the newest: what came after it is run again
    assert [score.step for score in found.curve] == [0, 3]
    assert [score.step for score in read_curve(tmp_path)] == [0, 3]
    assert len(list((tmp_path / CURVE_FOLDER).iterdir())) == 2
    assert due(found) == [6, 8]
    found.restore(-1)  # there is no checkpoint
    assert due(validation(config, tmp_path)) == [0, 3, 6, 8]


def test_without_every_nothing_is_validated_and_no_set_is_read(tmp_path: Path) -> None:
    config = config_with({"a": {"path": str(tmp_path / "missing.jsonl"), "reward": "exact_match"}})
    assert due(validation(config, tmp_path)) == []


def test_the_best_is_the_first_of_the_highest_or_lowest(tmp_path: Path) -> None:
    rewards = {0: [[0.0], [0.0], [1.0]], 3: [[1.0], [0.0], [1.0]], 6: [[0.0], [1.0], [1.0]], 8: [[0.0], [0.0], [0.0]]}
    for step, found in rewards.items():
        write_scores(tmp_path, step, [scored(found, step=step, measure=measure_of(config_with({"sums": {}})))])
    for metric, best in (("accuracy", (3, 2 / 3)), ("truncated_fraction", (0, 1 / 3))):
        train = {"num_steps": 8, "best_metric": f"validation/sums/{metric}"}
        config = config_with({"sums": {}}, validate={"every": 3}, train=train)
        found_best = validation(config, tmp_path)
        assert found_best.best() is None
        found_best.restore(8)
        assert found_best.best() == pytest.approx(best)
        assert found_best.best(among=[6, 8]) == pytest.approx((6, 2 / 3 if metric == "accuracy" else 1 / 3))


def measure_of(config: Config) -> str:
    return held_out_sets(config, PromptSource(config, TOKENIZER))[0].measure


def test_scores_from_before_a_change_of_what_is_measured_are_not_compared(tmp_path: Path) -> None:
    before, after = (
        config_with({"sums": asked}, validate={"every": 3}, train={"num_steps": 8})
        for asked in ({}, {"num_prompts": 2})
    )
    write_scores(tmp_path, 3, [scored([[1.0]], step=3, measure=measure_of(before))])
    found = validation(after, tmp_path)
    found.restore(3)
    assert found.best() is None and not found.measured and due(found) == [0, 3, 6, 8]
    write_scores(tmp_path, 6, [scored([[0.5]], step=6, measure=measure_of(after))])
    found.restore(6)
    assert found.best() == (6, 0.5)
    assert [score.step for score in read_curve(tmp_path)] == [6]
    for other in (
        {"validate": {"correct_reward": 0.5}},
        {"sampling": {"temperature": 0.5}},
        {"data": {"reward": "length"}},
    ):
        assert measure_of(config_with({"sums": {}}, **other)) != measure_of(before)
    assert measure_of(config_with({"sums": {}}, train={"num_steps": 9}, engine={"max_num_seqs": 8})) == measure_of(
        before
    )


def continuation(stage_dir: Path, step: int) -> Continuation:
    return Continuation(run="run", key=stage_dir.name, step=step, stage_dir=stage_dir, counts_on=True)


def test_a_continuation_has_the_curve_and_the_best_checkpoint_before_it(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for step in (0, 2, 4, 6):
        write_scores(first, step, [scored([[1.0]], step=step)])
        write_text(first / "checkpoints" / f"step={step:06d}" / "policy", str(step))
        write_json(first / "checkpoints" / f"step={step:06d}" / "manifest.json", {})
    write_json(first / "checkpoints" / "best.json", {"step": 2})
    adopt_history(second, continuation(first, 4))
    assert [score.step for score in read_curve(second)] == [0, 2, 4]
    assert list(kept_checkpoints(second)) == [2]
    assert not saved_steps(second)  # it is no checkpoint to go on from
    Checkpoints(second / "checkpoints", ToyPolicy(), Retention(1)).mark_best(2)  # as the restored trainer does
    write_json(second / "checkpoints" / "step=000008" / "manifest.json", {})
    adopt_history(third, continuation(second, 8))
    assert (kept_checkpoints(third)[2] / "policy").read_text() == "2"
    adopt_history(tmp_path / "early", continuation(first, 0))  # goes on from before the best
    assert kept_checkpoints(tmp_path / "early") == {}


def watched(values: list[float], **condition: Any) -> str | None:
    stop = EarlyStop(StopConfig.model_validate({"metric": "reward/mean", **condition}), ALONE)
    for step, value in enumerate(values):
        stop.observe(step, {"reward/mean": value, "reward/std": 9.0})
    return stop.reason


@pytest.mark.parametrize(
    ("values", "condition", "reason"),
    [
        ([0.1, 0.5, 0.6], {"above": 0.55}, "reward/mean = 0.6 after step 2 is above 0.55"),
        ([0.9, 0.5, 0.55], {"above": 0.55}, None),  # what was measured before the first step ends nothing
        ([0.9, 0.2, 0.6], {"below": 0.3}, "reward/mean = 0.2 after step 1 is below 0.3"),
        ([0.1, 0.4, 0.4, 0.3], {"no_gain_for": 2}, "no gain for 2 measurements, 0.4 after step 1 was the best"),
        ([0.5, 0.4, 0.6, 0.5], {"no_gain_for": 2}, None),
        ([0.5, 0.4, 0.3], {"no_gain_for": 2}, "0.5 after step 0 was the best"),
        ([float("nan")] * 3, {"no_gain_for": 2}, "no gain for 2 measurements"),
        ([float("nan")] * 3, {"above": 0.1}, None),
    ],
)
def test_training_ends_when_the_metric_says_so(
    values: list[float], condition: dict[str, Any], reason: str | None
) -> None:
    found = watched(values, **condition)
    assert found == reason or (reason is not None and found is not None and reason in found)


@pytest.mark.parametrize("condition", [{"no_gain_for": 2}, {"above": 0.45}])
def test_a_run_that_ended_early_trains_on_when_it_is_extended(condition: dict[str, Any]) -> None:
    known = [(step, {"reward/mean": value}) for step, value in enumerate([0.1, 0.5, 0.4, 0.3])]
    settings = StopConfig.model_validate({"metric": "reward/mean", **condition})
    ended = EarlyStop(settings, ALONE)
    ended.restore(known)
    assert ended.reason is not None  # also where it is started again before all of its results are written
    extended = EarlyStop(settings, ALONE, begun=3)
    extended.restore([*known, (3, {"reward/mean": 9.0})])  # as of another reward
    assert extended.reason is None
    for step, value, ends in ((4, 0.2, False), (5, 0.4, False), (6, 0.4, False), (7, 0.46, "above" in condition)):
        extended.observe(step, {"reward/mean": value})
        assert (extended.reason is not None) == ends
    for step in (8, 9):
        extended.observe(step, {"reward/mean": 0.2})
    assert extended.reason is not None


def test_early_stop_goes_by_lower_values_where_they_are_better() -> None:
    stop = EarlyStop(StopConfig(metric="drafter/loss", no_gain_for=2), ALONE)
    stop.restore([(step, {"drafter/loss": value}) for step, value in enumerate((3.0, 2.0, 1.0))])
    assert stop.reason is None
    stop.restore([(step, {"drafter/loss": value}) for step, value in enumerate((1.0, 2.0, 3.0))])
    assert stop.reason is not None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"stop_when": {"metric": "reward/mean"}}, r"train\.stop_when: no condition given: give one of above, below"),
        ({"stop_when": {"metric": "reward/mean", "above": 1, "below": 0}}, "above and below given: give one of"),
        ({"stop_when": {"metric": "reward/mena", "above": 1}}, r'train\.stop_when: metric = "reward/mena": it must be'),
        ({"stop_when": {"metric": "timing/step_s", "above": 1}}, "a metric of the groups validation, reward"),
        ({"stop_when": {"metric": "policy/lr", "no_gain_for": 2}}, "use above or below"),
        ({"stop_when": {"metric": "reward/mean", "abvoe": 2}}, "abvoe: unknown key; allowed here: metric, above"),
        ({"stop_when": {"metric": "validation/other/accuracy", "above": 1}}, "SET is sums"),
        (
            {"best_metric": "validation/sums/accuracy_low"},
            r'train\.best_metric = "validation/sums/accuracy_low": it must',
        ),
        ({"best_metric": "validation/sums/pass_at_4"}, "an I up to the set's samples_per_prompt"),
        ({"best_metric": "reward/mean"}, "it must be validation/SET/SCORE"),
    ],
)
def test_a_wrong_metric_to_go_by_is_one_line(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        config_with({"sums": {"samples_per_prompt": 2}}, validate={"every": 2}, train=sections)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "train",
    [
        {"final": "best"},
        {"best_metric": "validation/held-out/accuracy"},
        {"stop_when": {"metric": "validation/held-out/accuracy", "above": 0.9}},
    ],
)
def test_what_needs_validation_says_so(train: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"set validate\.every above 0"):
        config_with(train=train)
    config_with(validate={"every": 1}, train=train)


def test_the_speedup_of_a_step_follows_from_the_shares_of_its_parts() -> None:
    shares = {"generation": 0.5, "policy_update": 0.2, "drafter_update": 0.1, "validation": 0.2}
    # Of 80 s without the validation, 50 s of generation would be 90 s and 10 s of drafter training nothing.
    assert step_speedup(1.8, shares) == pytest.approx((80 + 40 - 10) / 80)
    assert step_speedup(1.0, {"generation": 1.0}) == 1
