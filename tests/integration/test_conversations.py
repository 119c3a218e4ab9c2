"""Conversations are the same with drafts, bubbles, kills and other ranks as without (FP32), turn by turn."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specrl.artifacts import read_curve
from specrl.config import Config, parse_config
from specrl.data.prompts import PromptSource
from specrl.models.sources import load_tokenizer
from specrl.rollout.requests import response_seed
from specrl.schemas import Rollout, read_folder
from tests.forks import run_module
from tests.integration.loop_plan import ON_FAILURE, LoopRun, toy_settings

pytestmark = pytest.mark.engine
MAX_TURNS, NUM_STEPS = 3, 3
TALK = {
    "environment": {"name": "tests.integration.loop_plan:Letters", "max_turns": MAX_TURNS},
    "data": {"reward": "task"},
}
PLAIN = {**TALK, "speculation": {"method": "none", "k": 0}}
BOTH = {**TALK, "speculation": {"method": "eagle3+replay"}, "bubbles": {"use": "both"}}
FAILING = {"name": "tests.integration.loop_plan:FailingLetters", "max_turns": MAX_TURNS}
LIMITS = {"reward": "task", "reward_timeout_s": 1.0, "reward_on_failure": ON_FAILURE, "reward_workers": 2}
RUNS = [
    LoopRun("plain", settings={**PLAIN, "validate": {"every": 3, "num_prompts": 4}}),
    LoopRun("bubbles", uneven=True, settings=BOTH),
    LoopRun("killed", kills=2, settings=BOTH),
    LoopRun("tensor-parallel", settings={**BOTH, "bubbles": {}, "engine": {"tensor_parallel": 2}}),
    LoopRun("failing", settings={**PLAIN, "environment": FAILING, "data": LIMITS, "train": {"num_steps": 1}}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in RUNS]))
    run_module("tests.integration.loop_runs", folder, folder / "runs.json")
    return folder


def config_of(runs: Path, name: str) -> Config:
    (run,) = (run for run in RUNS if run.name == name)
    return parse_config(toy_settings(runs, run))


def rows(runs: Path, name: str) -> list[Rollout]:
    found = read_folder(runs / name / "train-toy" / "rollouts")
    return sorted(found, key=lambda row: (row.step, row.prompt_id, row.sample))


def words(row: Rollout) -> tuple[object, ...]:
    """What must not depend on drafts, ranks and kills."""
    return (
        row.step,
        row.prompt_id,
        row.seed,
        row.prompt_tokens,
        row.response_tokens,
        row.turns,
        row.reward,
        row.finish_reason,
    )


@pytest.mark.parametrize("name", ["bubbles", "killed"])
def test_rollouts_and_policy_are_those_of_a_run_without_drafts_bubbles_and_kills(runs: Path, name: str) -> None:
    assert [words(row) for row in rows(runs, name)] == [words(row) for row in rows(runs, "plain")]
    assert sum(row.num_accepted_tokens for row in rows(runs, name)) > 0
    expected = load_file(runs / "plain" / "train-toy" / "policy" / "model.safetensors")
    found = load_file(runs / name / "train-toy" / "policy" / "model.safetensors")
    assert [key for key, tensor in found.items() if not torch.equal(tensor, expected[key])] == []


def test_the_ranks_of_an_engine_hold_the_same_conversations(runs: Path) -> None:
    """Up to the order in which the sums of a policy's update are made, and so exactly in the first step."""
    first = [[words(row) for row in rows(runs, name) if row.step == 0] for name in ("plain", "tensor-parallel")]
    assert first[0] == first[1]


def test_a_row_is_its_prompt_and_then_turns_with_the_environments_words_between(runs: Path) -> None:
    found, config = rows(runs, "plain"), config_of(runs, "plain")
    tokenizer = load_tokenizer(runs / "policy")
    source = PromptSource(config, tokenizer)
    assert {len(row.turns) for row in found} == {0, 3, 5}
    for row in found:
        assert len(row.response_tokens) == sum(row.turns or [len(row.response_tokens)])
        assert len(row.generation_logprobs) == row.num_sampled
        assert row.policy_logprobs is None or len(row.policy_logprobs) == row.num_sampled
        assert row.seed == response_seed(config.seed, row.step, row.prompt_id, row.sample)
        parts = [row.response_tokens[start:end] for start, end in pairwise(accumulate(row.turns, initial=0))]
        for number, (turn, written) in enumerate(zip(parts[::2], parts[1::2], strict=False), start=1):
            text = tokenizer.decode(turn, skip_special_tokens=True)
            assert tokenizer.decode(written) == "acegik"[: 1 + (len(text) + number) % 5]
    questions = {prompt.id: prompt.metadata["question"] for step in range(NUM_STEPS) for prompt in source.batch(step)}
    opened = {
        len(questions[row.prompt_id]) % 2 for row in found if tokenizer.decode(row.prompt_tokens).startswith("ac")
    }
    assert opened <= {1} and any(len(question) % 2 for question in questions.values()) == bool(opened)


def test_a_conversation_stays_within_the_bound_of_a_response_and_counts_as_cut_off_there(runs: Path) -> None:
    found, limit = rows(runs, "plain"), config_of(runs, "plain").sampling.max_response_tokens
    assert max(len(row.response_tokens) for row in found) <= limit
    assert {row.finish_reason for row in found} == {"stop", "length"}
    # Where words of the environment, five at most, left no room, they are left out.
    assert all(limit - len(row.response_tokens) <= 5 for row in found if row.finish_reason == "length")


def test_lengths_are_those_of_what_the_policy_wrote(runs: Path) -> None:
    for step in range(NUM_STEPS):
        record = json.loads((runs / "plain" / "train-toy" / "steps" / f"step={step:06d}.json").read_text())["metrics"]
        lengths = [row.num_sampled for row in rows(runs, "plain") if row.step == step]
        turns = [len(row.turns) // 2 + 1 for row in rows(runs, "plain") if row.step == step]
        assert record["rollout/turns_mean"] == pytest.approx(sum(turns) / len(turns))
        assert record["rollout/response_length_mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert record["mismatch/token_mult_prob_error"] == pytest.approx(1, abs=1e-4)


def test_held_out_problems_are_answered_in_conversations(runs: Path) -> None:
    """The generator's own scorer would give a toy's letters nothing."""
    assert [score.step for score in read_curve(runs / "plain" / "train-toy")] == [0, NUM_STEPS]
    assert all(score.accuracy > 0 for score in read_curve(runs / "plain" / "train-toy"))


def test_where_the_environment_fails_a_conversation_ends_with_its_words_and_the_reward_of_failures(runs: Path) -> None:
    found = rows(runs, "failing")
    failed = [row for row in found if row.reward == ON_FAILURE]
    assert failed and len(failed) < len(found)
    record = json.loads((runs / "failing" / "train-toy" / "steps" / "step=000000.json").read_text())["metrics"]
    assert record["reward/failures"] == len(failed)
