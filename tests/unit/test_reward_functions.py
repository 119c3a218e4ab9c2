"""What a reward of one's own may be and return, as users of TRL and verl have them, and what it gets of its row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from flows.cli import app
from specrl.config import Config, ConfigError, DataConfig, load_config
from specrl.data.check import empty_and_right
from specrl.data.files import read_problems
from specrl.data.problems import Counts, Problem, Prompt, fit_all
from specrl.data.rewards.functions import judge, make_rewards
from specrl.data.rewards.pool import RewardPool
from specrl.data.rewards.trial import doubtful_references, try_reward
from specrl.distributed import Ranks
from specrl.models.tiny import character_tokenizer
from specrl.rollout.conversations import rewarded_prompt, rewarded_text
from specrl.rollout.requests import Response
from specrl.schemas import Rollout
from specrl.training.rollouts import RolloutBatch

BODY = """
import asyncio
import numpy as np
import torch

def numpy_scalar(prompt, response, answer): return np.float32(0.5)
def numpy_bool(prompt, response, answer): return np.bool_(True)
def tensor(prompt, response, answer): return torch.tensor(0.5)
def boolean(prompt, response, answer): return response == answer
def table(prompt, response, answer): return {"score": 0.5, "acc": True}
def table_of_a_list(prompt, response, answer): return [{"score": [0.5]}]
def table_without_score(prompt, response, answer): return {"acc": True}
def left_out(prompt, response, answer): return None if response == "skip" else 1.0
def has_all(prompt, response, answer): return float(prompt.startswith("Be brief.\\nQ\\n"))
def columns(prompt, response, answer, level, *, source="none"): return level + (source == "amc")
def all_columns(prompt, response, answer, **columns): return len(columns)

async def judged(prompt, response, answer):
    await asyncio.sleep(0)
    return {"score": 0.25}

def trl(prompts, completions, answer, level, **kwargs):
    assert len(prompts) == len(completions) == len(answer) == len(level) == 1
    return [float(text == right) + number for text, right, number in zip(completions, answer, level)]

def trl_without_prompts(completions, **kwargs): return [1.0 if "x" in text else None for text in completions]
async def trl_async(completions, **kwargs): return [0.5 for _ in completions]
def trl_chat(prompts, completions, **kwargs):
    [[asked]], [[said]] = prompts, completions
    return [float(asked["content"] == "Q" and said["content"] == "x")]

def trl_first_message(prompts, completions, **kwargs):
    return [float(prompts[0][0] == {"role": "system", "content": "Be brief."} and len(prompts[0]) == 2)]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["index"] == 3
    return {"score": float(solution_str == ground_truth), "acc": 1}

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert data_sources == ["openai/gsm8k"] and extra_infos[0]["index"] == 3
    return [{"score": float(said == right)} for said, right in zip(solution_strs, ground_truths)]

def trl_tokens(completion_ids, **kwargs): return [float(len(ids)) for ids in completion_ids]

def openrlhf(queries, prompts, labels):
    return {"rewards": torch.tensor([float(queries == ["Qx"] and prompts == ["Q"] and labels == ["x"])])}

def right(prompt, response, answer): return float((prompt, response, answer) == ("Q", "a response", "x"))
def keywords_alone(*, prompt, response, answer, level): return right(prompt, response, answer) * (level == 2)
def any_keywords(**given): return right(given["prompt"], given["response"], given["answer"]) * (given["level"] == 2)
def in_another_order(response, answer, prompt="", level=0): return right(prompt, response, answer) * (level == 2)
def without_a_prompt(response, answer, level): return right("Q", response, answer) * (level == 2)
def own_names(question, response, reference, level=0): return right(question, response, reference) * (level == 2)
def in_third_place(prompt, answer, response): return right(prompt, response, answer)
def without_an_answer(prompt, response): return right(prompt, response, "x")
def the_response_alone(response): return right("Q", response, "x")
def any_arguments(*args, **_): return right(*args)
def of_gold(prompt, response, gold, answer=None): return right(prompt, response, gold)
def of_others(query, output, response): return right(query, output, response)
def in_their_order(question, answer, response): return right(question, answer, response)
def without_a_place(response, ground_truth): return 1.0

def reads_a_file(prompt, response, answer): return float(open("words.txt").read())

def timed(function):
    def wrapper(*args, **kwargs): return function(*args, **kwargs)
    return wrapper

@timed
def decorated(prompt, response, answer, level=0, **columns): return level + (response == answer)

class Scorer:
    def __call__(self, prompt, response, answer): return 0.75

scorer = Scorer()
"""
ENTRY = {"level": 2, "source": "amc", "data_source": "openai/gsm8k", "extra_info": {"index": 3}}


@pytest.fixture(scope="module", autouse=True)
def module_of_rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards_of_users.py").write_text(BODY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def data(name: str, **settings: Any) -> DataConfig:
    own = {"source": "file", "path": "x.jsonl", "reward": f"rewards_of_users:{name}"}
    return DataConfig.model_validate(own | settings)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("numpy_scalar", 0.5),
        ("numpy_bool", 1.0),
        ("tensor", 0.5),
        ("boolean", 1.0),
        ("table", 0.5),
        ("table_of_a_list", 0.5),
        ("left_out", 1.0),
        ("columns", 3.0),
        ("all_columns", 4.0),
        ("judged", 0.25),
        ("trl", 3.0),
        ("trl_without_prompts", 1.0),
        ("trl_async", 0.5),
        ("trl_tokens", 1.0),
        ("verl", 1.0),
        ("verl_batch", 1.0),
        ("openrlhf", 1.0),
        ("scorer", 0.75),
        ("decorated", 3.0),
    ],
)
def test_a_reward_is_called_as_its_parameters_say_and_may_return_what_has_a_number(name: str, expected: float) -> None:
    prompt = Prompt(0, "Q", [], "x", {"question": "Q", "entry": ENTRY})
    assert judge(make_rewards(data(name))[0], prompt, "x") == expected


@pytest.mark.parametrize(
    "name",
    [
        *("keywords_alone", "any_keywords", "in_another_order", "without_a_prompt", "own_names"),
        *("in_third_place", "without_an_answer", "the_response_alone"),
        *("any_arguments", "of_gold", "of_others", "in_their_order"),
    ],
)
def test_a_reward_that_names_prompt_response_and_answer_gets_them_by_name_and_others_by_position(name: str) -> None:
    prompt = Prompt(0, "Q", [], "x", {"question": "Q", "entry": ENTRY})
    assert judge(make_rewards(data(name))[0], prompt, "a response") == 1


def test_a_reward_of_two_of_which_one_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"does not take \(prompt, response, answer\): too many positional"):
        make_rewards(data("without_a_place"))


def test_a_reward_of_trl_sees_conversations_where_the_template_is_a_chat() -> None:
    prompt = Prompt(0, "<|user|>Q", [], "x", {"question": "Q"})
    assert judge(make_rewards(data("trl_chat", template="chat"))[0], prompt, "x") == 1


def test_a_reward_of_trl_sees_the_messages_before_the_question() -> None:
    context = [{"role": "tools", "content": "", "tools": [{}]}, {"role": "system", "content": "Be brief."}]
    found = Problem("Q", "x", " x", context=context)
    prompt = Prompt(0, "<|user|>Q", [], found.answer, found.metadata)
    assert judge(make_rewards(data("trl_first_message", template="chat"))[0], prompt, "x") == 1


def test_what_has_no_number_and_a_column_that_is_not_there_are_failures() -> None:
    prompt = Prompt(0, "Q", [], "x", {"question": "Q"})
    assert judge(make_rewards(data("table_without_score"))[0], prompt, "x") == (
        "returned {'acc': True}, which is not a finite number"
    )
    assert "missing 1 required positional argument: 'level'" in str(
        judge(make_rewards(data("columns"))[0], prompt, "x")
    )
    assert "name files beside its module by Path(__file__)" in str(
        judge(make_rewards(data("reads_a_file"))[0], prompt, "x")
    )


@pytest.mark.parametrize("file", ["rewards/mine.py", "./rewards/mine.py", "rewards.mine.py"])
def test_the_path_of_a_file_is_refused_with_the_name_of_its_module(file: str) -> None:
    with pytest.raises(ConfigError, match=r'name the module, not its file: "rewards\.mine:score"'):
        make_rewards(DataConfig(source="file", path="x.jsonl", reward=f"{file}:score"))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_other_columns_of_a_file_reach_the_reward(ending: str, tmp_path: Path) -> None:
    row = {"prompt": "Q", "answer": "x", "level": 2, "source": "amc"}
    path = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    config = data("columns", path=path)
    [problem] = read_problems(path, Config(name="x", data=config), fit_all, Counts())
    prompt = Prompt(0, "Q", [], problem.answer, {"question": "Q", "entry": problem.entry})
    assert make_rewards(config)[0](prompt, "x") == 3
    built_in = Config(name="x", data=data("columns", path=path, reward="exact_match"))
    [problem] = read_problems(path, built_in, fit_all, Counts())
    assert problem.entry == {}


def test_a_response_that_is_left_out_has_no_advantage() -> None:
    pool = RewardPool(data("left_out"))
    try:
        scoring = pool.begin(pool.config)
        for number, response in enumerate(["a", "skip", "b", "skip"]):
            scoring.submit(number, Prompt(number // 3, "Q", [], "x"), response)
        scores = scoring.wait()
    finally:
        pool.close()
    assert scores.rewards == pytest.approx([1.0, math.nan, 1.0, math.nan], nan_ok=True) and not scores.failures
    for rewards, filled in (
        ([*scores.rewards], [1.0, 1.0, 1.0, 0.0]),
        ([1.0, 0.0, math.nan, 0.5], [1.0, 0.0, 0.5, 0.5]),
    ):
        common = [(0, 0, number // 3, number % 3, 0, 0, 0, [1], [2], [-1.0], "", "", "stop") for number in range(4)]
        rows = [Rollout(*row, reward=reward) for row, reward in zip(common, rewards, strict=True)]
        batch = RolloutBatch.gather(Ranks(0, 1, 0, torch.device("cpu")), rows, data=pool.config)
        batch.assign_advantages(Config(name="x", data=pool.config))
        assert batch.rewards.tolist() == filled == [row.reward for row in rows]
        assert not batch.advantages[np.isnan(rewards)].any()


def config_file(folder: Path, reward: str, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "config.toml"
    path.write_text(f'name = "x"\n[data]\nsource = "file"\npath = "{folder}/rows.jsonl"\nreward = "{reward}"\n')
    return path


def test_special_tokens_reach_the_reward_that_asks_for_them() -> None:
    tokenizer = character_tokenizer(64)
    tokens = [*tokenizer.encode("4</s>")]
    response = Response(tokens, [0.0] * len(tokens), None, "4", "stop", 0.0, 0.0)
    assert rewarded_text(response, tokenizer, data("boolean")) == "4"
    assert rewarded_text(response, tokenizer, data("boolean", reward_special_tokens=True)) == "4</s>"


def test_the_tokens_of_a_response_reach_a_reward_of_trl() -> None:
    asked, response = Prompt(0, "Q", [], "x", {"entry": ENTRY}), Response([3, 4, 5], [], None, "x", "stop", 0.0, 0.0)
    config = data("trl_tokens")
    assert judge(make_rewards(config)[0], rewarded_prompt(asked, response, config), response.text) == 3
    assert rewarded_prompt(asked, response, data("x", reward="exact_match")) == asked


def test_references_that_no_response_can_match_are_counted(tmp_path: Path) -> None:
    values = {"name": "x", "data": {"source": "file", "path": str(tmp_path / "r.jsonl"), "reward": "math_verify"}}
    stated = {"2\\sqrt{3}": "Answer: 2\\sqrt{3}", "5": "Answer: 5", "6": "Answer: 7"}
    found = [(Prompt(0, answer, [], answer), text) for answer, text in stated.items()]
    [line] = doubtful_references(Config.model_validate(values), [*found, *found])
    assert line.startswith("1 of the 3 references looked at do not earn 1 by data.reward = 'math_verify'")
    assert line.endswith("the first one: '6'") and "\n" not in line
    assert doubtful_references(Config.model_validate(values), found[:2]) == []


def test_a_reward_of_the_users_may_want_the_answer_alone(tmp_path: Path) -> None:
    rows = [{"prompt": f"Q{row}", "answer": str(row)} for row in range(3)]
    config = load_config(config_file(tmp_path, "rewards_of_users:boolean", rows))
    stated = [(Prompt(0, answer, [], answer), f"Answer: {answer}") for answer in ("5", "6")]
    assert doubtful_references(config, stated) == []
    empty, right = empty_and_right(config)
    assert (empty.score, right.score) == (0.0, 1.0)
    thoughtful = Prompt(0, "Q\n<think>\n", [], "7")
    [line] = doubtful_references(config, [*stated, (thoughtful, "</think>\nAnswer: 7")])
    assert line.startswith("1 of the 3 references looked at do not earn 1")


def test_a_reward_that_is_tried_sees_all_messages_of_its_row_as_in_a_run(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q"}]
    rows = [{"prompt": [*chat, {"role": "user", "content": str(number)}], "answer": "x"} for number in range(3)]
    config = load_config(config_file(tmp_path, "rewards_of_users:has_all", rows))
    assert try_reward(config, "x", 0).score == 1.0


def test_a_reward_that_fails_is_said_once_and_by_the_exit_code(tmp_path: Path) -> None:
    rows = [{"prompt": f"Q{number}", "answer": "x"} for number in range(3)]
    (tmp_path / "response.txt").write_text("x")
    for name, code, words in (
        ("table_without_score", 1, "returned {'acc': True}, which is not a finite number"),
        ("left_out", 0, "score: 1 in"),
    ):
        path = config_file(tmp_path, f"rewards_of_users:{name}", rows)
        found = CliRunner().invoke(app, ["reward", str(path), "--response", str(tmp_path / "response.txt")])
        assert found.exit_code == code and found.output.count(words) == 1
