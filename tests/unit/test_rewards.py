from __future__ import annotations

import code
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrl.config import ConfigError, DataConfig, GeneratorConfig
from specrl.data.answers import extract_answer
from specrl.data.generators import make_generator
from specrl.data.problems import Prompt
from specrl.data.rewards.functions import judge, make_rewards


def prompt(answer: str, entry: dict[str, Any] | None = None) -> Prompt:
    return Prompt(0, "Q", [1], answer, {"question": "Q", "generator": 0, "entry": entry or {}})


def file_reward(name: str) -> DataConfig:
    return DataConfig(source="file", path=Path("rows.jsonl"), reward=name)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (" 3 + 5 = 8. Answer: 8", 1.0),
        (" 3 + 5 = 8. Answer: 08", 1.0),
        (" 3 + 5 = 8. Answer: 9", 0.0),
        (" 3 + 5 = 8. Answer: 80", 0.0),
        (" 8", 0.0),
        (" Answer: 8\nQ: 1 + 1\nA: 1 + 1 = 2. Answer: 2", 0.0),
        ("", 0.0),
    ],
)
def test_worked_sums_reward_the_last_stated_sum(response: str, expected: float) -> None:
    assert make_rewards(DataConfig())[0](prompt("8"), response) == expected


def test_a_sum_of_zero_can_be_stated() -> None:
    assert make_rewards(DataConfig())[0](prompt("0"), " 0 + 0 = 0. Answer: 0") == 1.0


def test_the_task_reward_is_the_generators_own_scorer() -> None:
    config = DataConfig(generators=(GeneratorConfig(name="chain_sum"),))
    problem = next(iter(make_generator(config.generators[0]).problems(1)))
    reward = make_rewards(config)[0]
    item = prompt(problem.answer, problem.entry)
    assert reward(item, f"I add them up. Answer: {problem.answer}.0") == 1.0
    assert reward(item, f"<answer>{problem.answer}</answer>") == 1.0
    assert reward(item, "Answer: 123456789") < 0.5


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("Paris", "It is in France. Answer: paris.", 1.0),
        ("1234", "the answer is: 1,234", 1.0),
        ("a  b", "<answer>A b</answer>", 1.0),
        ("Paris", "Lyon", 0.0),
        ("12", "Answer: 1,2", 0.0),
    ],
)
def test_exact_match_forgives_case_spacing_and_separators(answer: str, response: str, expected: float) -> None:
    assert make_rewards(file_reward("exact_match"))[0](prompt(answer), response) == expected


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("1/2", "Answer: 0.5", 1.0),
        ("\\frac{1}{2}", "so we get $\\boxed{\\frac{2}{4}}$", 1.0),
        ("3", "Answer: 4", 0.0),
        ("3", "", 0.0),
    ],
)
def test_math_verify_compares_values_not_strings(answer: str, response: str, expected: float) -> None:
    assert make_rewards(file_reward("math_verify"))[0](prompt(answer), response) == expected


def test_math_verify_also_works_outside_the_main_thread() -> None:
    rewards: list[float] = []
    reward = make_rewards(file_reward("math_verify"))[0]
    thread = threading.Thread(target=lambda: rewards.append(reward(prompt("1/2"), "Answer: 0.5")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    name = f"own_reward_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_an_imported_reward_gets_prompt_response_and_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "def score(prompt, response, answer):\n    return len(prompt) + len(response) / 10 + len(answer) / 100\n"
    name = write_module(tmp_path, monkeypatch, body)
    assert make_rewards(file_reward(f"{name}:score"))[0](prompt("abc"), "xy") == pytest.approx(1.23)


def test_a_reward_that_raises_or_returns_no_finite_number_is_judged_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "def score(prompt, response, answer):\n    return float(response)\n"
    reward = make_rewards(file_reward(f"{write_module(tmp_path, monkeypatch, body)}:score"))[0]
    assert [judge(reward, prompt("1"), text) for text in ("0.5", "nan", "-inf", "weird")] == [
        0.5,
        "returned nan, which is not a finite number",
        "returned -inf, which is not a finite number",
        "raised ValueError: could not convert string to float: 'weird'",
    ]


@pytest.mark.parametrize("reward", ["exact_match", "math_verify"])
@pytest.mark.parametrize("reference", ["", " ", '[""]', "\\boxed{}"])
def test_silence_earns_nothing_where_a_reference_is_empty(reward: str, reference: str) -> None:
    [function] = make_rewards(file_reward(reward))
    assert [judge(function, prompt(reference), text) for text in ("", " ", "Answer:")] == [0, 0, 0]


LIMITS = """
import os, urllib.request
def variable(prompt, response, answer): return float(os.environ["NOT_THERE"])
def column(prompt, response, answer): return {"a": 1}["NOT_THERE"]
def writes(prompt, response, answer): raise OSError(30, "Read-only file system", "/x")
def asks(prompt, response, answer):
    try:
        raise OSError(1, "Operation not permitted")
    except OSError as error:
        raise RuntimeError("Connection error.") from error
class Mute(Exception):
    def __str__(self): raise ValueError
def mute(prompt, response, answer): raise Mute
"""


@pytest.mark.parametrize(
    ("function", "end"),
    [
        ("variable", "KeyError: 'NOT_THERE' (it sees the variables that data.reward_environment names)"),
        ("column", "KeyError: 'NOT_THERE'"),
        ("mute", "Mute: something that has no text"),
        ("writes", "'/x' (it may write in the folder that it runs in alone)"),
        ("asks", "RuntimeError: Connection error. (it has no network without data.reward_network = true)"),
    ],
)
def test_an_error_that_a_limit_of_rewards_has_caused_names_the_setting(
    function: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = make_rewards(file_reward(f"{write_module(tmp_path, monkeypatch, LIMITS)}:{function}"))[0]
    assert str(judge(reward, prompt("1"), "")).endswith(end)


def test_a_module_that_is_not_found_or_is_another_one_says_where_it_was_looked_for() -> None:
    for path, words in (
        ("not_written_yet:score", f"looked for in the folder {Path.cwd()} and on PYTHONPATH"),
        ("not_written_yet.part:score", "and on PYTHONPATH"),
        ("code:score", f"it was imported from {code.__file__}"),
        ("./rewards/mine:score", 'name the module, not its file: "rewards.mine:score"'),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            make_rewards(file_reward(path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("exact", "must be task, math_verify, exact_match, length, code, judge or package.module:function"),
        ("no.such.module:score", "cannot be imported"),
        ("tasks.own:score", "on PYTHONPATH, and tasks is "),  # which is specrl's
        ("math:no_such_function", "cannot be imported"),
        ("math:pi", r"does not take \(prompt, response, answer\)"),
        ("math:sqrt", r"does not take \(prompt, response, answer\)"),
    ],
)
def test_a_wrong_import_path_is_refused_before_anything_runs(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rewards(file_reward(path))


@pytest.mark.parametrize("body", ["def score(:\n", "raise AttributeError('no key')\n", "1 / 0\n"])
def test_a_module_that_fails_on_import_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    with pytest.raises(ConfigError, match=r'data\.reward = "own_reward_\d+:score" cannot be imported: ') as error:
        make_rewards(file_reward(f"{write_module(tmp_path, monkeypatch, body)}:score"))
    assert "\n" not in str(error.value) and "imported from" not in str(error.value)


def test_a_reward_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward_beside_the_config.py").write_text("def score(prompt, response, answer):\n    return 1.0\n")
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert make_rewards(file_reward("reward_beside_the_config:score"))[0](prompt("1"), "") == 1.0


def test_the_task_reward_needs_a_generator() -> None:
    with pytest.raises(ConfigError, match="generator's own scorer"):
        make_rewards(file_reward("task"))


@given(st.text(max_size=60).filter(lambda text: "answer" not in text.casefold()))
def test_a_response_without_a_label_is_its_own_answer(text: str) -> None:
    assert extract_answer(text) == text.strip()


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "a", "\n", "b "]), max_size=12).map("".join))
def test_the_last_pair_of_tags_holds_the_answer(text: str) -> None:
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    assert extract_answer(text) == (tagged[-1] if tagged else text).strip()


REWARDS = [
    make_rewards(DataConfig())[0],
    make_rewards(DataConfig(generators=(GeneratorConfig(name="fraction_simplification"),)))[0],
    make_rewards(file_reward("exact_match"))[0],
    make_rewards(file_reward("math_verify"))[0],
]
PIECES = st.sampled_from(
    ["Answer: ", "\\frac{", "}", "1/0", "$", "9" * 400, "<answer>", "</answer>", "nan", "\ud800", "**"]
)


@settings(deadline=None, max_examples=60)
@given(st.lists(PIECES | st.text(max_size=5), max_size=8).map("".join), st.sampled_from(range(len(REWARDS))))
def test_no_response_makes_a_reward_raise(response: str, which: int) -> None:
    entry = {"answer": "$\\frac{1}{3}$", "metadata": {"simplified_numerator": 1, "simplified_denominator": 3}}
    assert 0.0 <= REWARDS[which](prompt("3", entry), response) <= 1.0
