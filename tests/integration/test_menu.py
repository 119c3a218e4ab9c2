"""Each entry of the menu, in two steps on one prepared model, does what it is there for.

Rollouts of the first step are those of a run without the entry (`plain`), because the same policy samples them with the
same seeds. A step's only update has ratios of 1, so that its loss follows from the advantages and lengths of its rows.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specrl.data.rewards.calculator import Calculator
from specrl.models.sources import load_tokenizer
from specrl.schemas import Rollout, read_folder
from specrl.step_record import read_steps
from tests.forks import run_module
from tests.integration.menu_runs import COEFFICIENT, LONGEST, NUM_STEPS, PROGRAM, SCALE, config_of, menu_of
from tests.unit.test_reward_code import HELD, needs_sandbox
from tests.unit.test_reward_judge import Server, serving
from tests.unit.test_tensorboard import scalars
from tests.unit.test_weights_biases import records
from tests.unit.test_weights_biases import rows as wandb_rows

pytestmark = pytest.mark.engine
EPSILON = 1e-6
ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k2": lambda ratio: ratio**2 / 2,
    "k3": lambda ratio: (-ratio).exp() - 1 + ratio,
}


@pytest.fixture(scope="module")
def judge() -> Iterator[Server]:
    with serving(counted="=") as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, judge: Server) -> Path:
    folder = tmp_path_factory.mktemp("menu")
    (folder / "menu.json").write_text(json.dumps(menu_of(folder, judge.url, runs_programs=not HELD.gaps(False))))
    run_module("tests.integration.menu_runs", folder)
    return folder


def train_dir(runs: Path, name: str) -> Path:
    return runs / name / "stages" / "train-0"


def metrics(runs: Path, name: str, step: int) -> dict[str, float]:
    found: dict[str, float] = read_steps(train_dir(runs, name) / "steps")[step].metrics
    return found


def rows(runs: Path, name: str, step: int) -> list[Rollout]:
    found = [row for row in read_folder(train_dir(runs, name) / "rollouts") if row.step == step]
    return sorted(found, key=lambda row: (row.prompt_id, row.sample))


def groups(found: Sequence[Rollout], value: Callable[[Rollout], float]) -> list[list[float]]:
    by_prompt: dict[int, list[float]] = {}
    for row in found:
        by_prompt.setdefault(row.prompt_id, []).append(value(row))
    return list(by_prompt.values())


def advantages(found: Sequence[Rollout]) -> Any:
    return [pytest.approx(group, abs=1e-3) for group in groups(found, lambda row: row.advantage)]


def loss(found: Sequence[Rollout], mean: str = "token") -> float:
    """The loss of an update whose ratios are 1."""
    average = fmean(row.num_sampled for row in found)
    divisors = {"token": [average] * len(found), "response": [row.num_sampled for row in found]}
    divided = zip(found, divisors.get(mean, [LONGEST] * len(found)), strict=True)
    return -fmean(row.advantage * row.num_sampled / divisor for row, divisor in divided)


def centred(rewards: Sequence[float]) -> list[float]:
    return [reward - fmean(rewards) for reward in rewards]


def grpo(rewards: Sequence[float]) -> list[float]:
    return [value / (pstdev(rewards) + EPSILON) for value in centred(rewards)]


def over_step(values: list[list[float]]) -> list[list[float]]:
    scale = pstdev(chain.from_iterable(values)) + EPSILON
    return [[value / scale for value in group] for group in values]


PRESETS: dict[str, tuple[Callable[[list[list[float]]], list[list[float]]], str]] = {
    "plain": (lambda found: [grpo(rewards) for rewards in found], "token"),
    "dr-grpo": (lambda found: [centred(rewards) for rewards in found], "constant"),
    "rloo": (lambda found: [[value * 4 / 3 for value in centred(rewards)] for rewards in found], "constant"),
    "reinforce": (lambda found: over_step([centred(rewards) for rewards in found]), "token"),
}
"""What a preset makes of the rewards of groups of four, and what its loss is a mean over."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_advantages_and_its_mean(runs: Path, name: str) -> None:
    found, (expected, mean) = rows(runs, name, 0), PRESETS[name]
    assert [row.response_tokens for row in found] == [row.response_tokens for row in rows(runs, "plain", 0)]
    assert advantages(found) == expected(groups(found, lambda row: row.reward))
    measured = pytest.approx(metrics(runs, name, 0)["policy/loss"], rel=1e-3)
    assert [other for other in ("token", "response", "constant") if loss(found, other) == measured] == [mean]


def test_gspo_has_a_mean_over_responses_and_clips_each_where_grpo_would_not(runs: Path) -> None:
    found, measured = rows(runs, "gspo", 0), metrics(runs, "gspo", 0)
    assert measured["policy/loss"] == pytest.approx(loss(found, "response"), abs=1e-4) != loss(found)
    assert measured["policy/clip_fraction"] > 0.05


def test_cispo_weights_the_log_probs_and_not_their_ratios(runs: Path) -> None:
    found = rows(runs, "cispo", 0)
    gain = sum(row.advantage * sum(row.policy_logprobs or ()) for row in found)
    expected = -gain / sum(row.num_sampled for row in found)
    assert metrics(runs, "cispo", 0)["policy/loss"] == pytest.approx(expected, rel=1e-2)
    assert expected != pytest.approx(loss(found), rel=0.1)


def test_dapo_asks_more_prompts_for_groups_with_signal_and_punishes_what_is_too_long(runs: Path) -> None:
    found, measured = rows(runs, "dapo", 0), metrics(runs, "dapo", 0)
    differing = [len(set(rewards)) > 1 for rewards in groups(found, lambda row: row.reward)]
    assert sum(differing) == 4 < len(differing)
    assert measured["rollout/dropped_groups"] == len(differing) - 4 and measured["rollout/refill_rounds"] > 0
    window = round(0.2 * LONGEST)
    punished = groups(found, lambda row: row.reward - max(0.0, 1 - (LONGEST - row.num_sampled) / window))
    expected = [grpo(group) if kept else [0.0] * 4 for group, kept in zip(punished, differing, strict=True)]
    assert advantages(found) == expected and measured["reward/overlong_penalty"] < 0
    cut_off = [row for row in found if row.finish_reason == "length"]
    assert cut_off and not any(row.policy_logprobs for row in cut_off)
    assert any(row.policy_logprobs for row in rows(runs, "plain", 0) if row.finish_reason == "length")


def test_gdpo_normalises_each_part_of_the_reward(runs: Path) -> None:
    found = rows(runs, "gdpo", 0)
    parts = [groups(found, lambda row, name=name: dict(row.reward_parts or {})[name]) for name in ("odd", "length")]
    sums = [[a + 0.5 * b for a, b in zip(*map(grpo, columns), strict=True)] for columns in zip(*parts, strict=True)]
    assert advantages(found) == over_step(sums)


def test_the_entropy_is_a_part_of_the_loss(runs: Path) -> None:
    measured = metrics(runs, "entropy", 0)
    expected = loss(rows(runs, "entropy", 0)) - COEFFICIENT * measured["policy/entropy"]
    assert measured["policy/loss"] == pytest.approx(expected, abs=1e-4) and measured["policy/entropy"] > 0.1


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_a_divergence_is_a_part_of_the_loss_or_of_the_advantages(runs: Path, estimator: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(runs / "calculator/stages/prepare-0/policy")

    def divergence(row: Rollout) -> float:
        tokens, start = torch.tensor([*row.prompt_tokens, *row.response_tokens]), len(row.prompt_tokens)
        before = reference(tokens[None]).logits[0].log_softmax(-1)[range(start - 1, len(tokens) - 1), tokens[start:]]
        return float(ESTIMATES[estimator](torch.tensor(row.generation_logprobs) - before.detach()).sum())

    for place in ("loss", "reward"):
        found, measured = rows(runs, f"{estimator}-{place}", 1), metrics(runs, f"{estimator}-{place}", 1)
        mean = sum(map(divergence, found)) / sum(row.num_sampled for row in found)
        assert measured["policy/kl"] == pytest.approx(mean, rel=1e-3) and mean > 1e-3
        in_loss, in_reward = (COEFFICIENT, 0.0) if place == "loss" else (0.0, COEFFICIENT)
        assert measured["policy/loss"] == pytest.approx(loss(found) + in_loss * mean, abs=1e-4)
        pairs = zip(groups(found, lambda row: row.reward), groups(found, divergence), strict=True)
        assert advantages(found) == [
            [value - in_reward * 4 / 3 * less for value, less in zip(grpo(rewards), centred(penalties), strict=True)]
            for rewards, penalties in pairs
        ]


def test_a_reference_that_is_renewed_is_the_policy_that_samples(runs: Path) -> None:
    first, renewed = (metrics(runs, name, 1)["policy/kl"] for name in ("k3-loss", "renewed"))
    assert first > 1e-3 and renewed == pytest.approx(0, abs=1e-6)


def test_adapters_change_and_the_weights_below_them_do_not(runs: Path) -> None:
    begun = load_file(runs / "calculator/stages/prepare-0/policy/model.safetensors")
    adapters = load_file(train_dir(runs, "lora") / "adapter/adapter_model.safetensors")
    for name, tensor in load_file(train_dir(runs, "lora") / "policy/model.safetensors").items():
        module = f"base_model.model.{name.removesuffix('weight')}"
        down, up = (adapters.pop(f"{module}lora_{letter}.weight", None) for letter in "AB")
        delta = torch.zeros(()) if down is None or up is None else SCALE * up @ down
        assert bool(delta.any()) == (up is not None)
        torch.testing.assert_close(tensor, begun[name] + delta, atol=1e-6, rtol=0)
    assert not adapters


def test_a_teacher_is_all_that_is_learned_from_and_comes_nearer(runs: Path) -> None:
    first, second = (metrics(runs, "taught", step) for step in range(NUM_STEPS))
    assert first["policy/loss"] == pytest.approx(first["policy/teacher_kl"], rel=1e-3)
    assert 0 < second["policy/teacher_kl"] < first["policy/teacher_kl"]


def test_the_calculator_writes_into_conversations_what_is_not_trained_on(runs: Path) -> None:
    found, measured = rows(runs, "calculator", 0), metrics(runs, "calculator", 0)
    tokenizer = load_tokenizer(runs / "calculator/stages/prepare-0/policy")
    for row in found:
        parts = [row.response_tokens[start:end] for start, end in pairwise(accumulate(row.turns, initial=0))]
        for turn, written in zip(parts[::2], parts[1::2], strict=False):
            [message], _, _ = Calculator().step(tokenizer.decode(turn, skip_special_tokens=True))
            assert tokenizer.decode(written) == message["content"]
        assert row.policy_logprobs is None or len(row.policy_logprobs) == row.num_sampled
    assert any(row.policy_logprobs and row.num_sampled < len(row.response_tokens) for row in found)
    assert measured["rollout/turns_mean"] == fmean(len(row.turns) // 2 + 1 for row in found) > 1
    assert measured["policy/loss"] == pytest.approx(loss(found), abs=1e-4)


def test_the_calculators_file_goes_through_all_stages(runs: Path) -> None:
    validated, exported = (
        json.loads((runs / f"calculator/stages/{stage}-0/result.json").read_text()) for stage in ("validate", "export")
    )
    assert [validated["exactness"][way]["num_differences"] for way in ("sampled", "greedy")] == [0, 0]
    assert exported["vllm_acceptance_length"] > 1


def test_a_judge_and_a_penalty_for_length_are_weighted_parts_that_are_logged(runs: Path, judge: Server) -> None:
    found, measured = rows(runs, "judge", 0), metrics(runs, "judge", 0)
    scores = [row.response.count("=") / 10 for row in found]
    lengths = [max(0.0, (60 - len(row.response)) / 60) for row in found]
    assert [row.reward for row in found] == pytest.approx([a + 0.5 * b for a, b in zip(scores, lengths, strict=True)])
    assert measured["reward/part/judge"] == pytest.approx(fmean(scores)) and any(scores)
    assert measured["reward/part/length"] == pytest.approx(fmean(lengths))
    asked = {one["messages"][0]["content"] for one in judge.asked}
    assert {row.response for row in found} <= asked


@needs_sandbox
def test_programs_run_and_earn_what_passes_the_tests(runs: Path) -> None:
    found = rows(runs, "code", 0) + rows(runs, "code", 1)
    passing = [row.reward for row in found if PROGRAM in row.response and row.response.count("```") == 2]
    assert passing == [1] * len(passing) != []
    assert all(row.reward == 0 for row in found if PROGRAM.strip() not in row.response)


def test_steps_that_are_asked_for_are_traced_on_every_rank(runs: Path) -> None:
    traces = sorted((train_dir(runs, "watched") / "traces").iterdir())
    assert [path.name for path in traces] == [f"step=000001-rank={rank:05d}.json.gz" for rank in range(2)]
    for path in traces:
        names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert {"generation", "policy_update"} <= names


def test_trackers_files_have_the_metrics_of_every_step(runs: Path) -> None:
    expected = [(step, metrics(runs, "watched", step)["reward/mean"]) for step in range(NUM_STEPS)]
    board = scalars(runs / "watched/tensorboard/train-0")
    assert [(step, value) for name, step, value in board if name == "reward/mean"] == expected
    [file] = records(config_of(runs, "watched"))
    sent = [(row["step"], row["reward/mean"]) for row in wandb_rows(file) if "reward/mean" in row]
    assert sent == [(step, pytest.approx(value)) for step, value in expected]
