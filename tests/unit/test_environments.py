"""Environments: what they may return, how they fail, the calculator, and the processes that they run in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specrl.config import Config, ConfigError, DataConfig, load_config, parse_config
from specrl.context import StageContext
from specrl.data.files import read_problems
from specrl.data.problems import Counts, Problem, Prompt, fit_all
from specrl.data.rewards import sandbox
from specrl.data.rewards.calculator import REFUSALS, Calculator, value, written
from specrl.data.rewards.code import refuse_open_sandbox
from specrl.data.rewards.environments import NotATurnError, Turn, check_scoring, make_environment, play
from specrl.data.rewards.functions import runs_code, starts_processes
from specrl.data.rewards.pool import FailureTally, RewardError, RewardFailure, RewardPool, Scoring, refuse_failure
from specrl.data.rewards.worker import Outcome
from specrl.keys import run_keys
from specrl.stages import prepare

ROOT = Path(__file__).parents[2]
BODY = """
import contextlib, os, time

class Counter:
    def reset(self, problem):
        self.turns, self.problem = 0, problem
        if problem.question == "broken":
            raise KeyError("no such problem")
        return [{"role": "user", "content": f"count to {problem.answer}"}] if problem.entry else []

    def step(self, text):
        self.turns += 1
        if text == "hang":
            time.sleep(1000)
        if text == "die":
            os._exit(3)
        if text == "forge":
            for number in range(3, 64):
                with contextlib.suppress(OSError):
                    os.write(number, b'{"parts": [5.0]}')
        if text == "raise":
            raise ValueError("no answer to this")
        content = "x" * 70_000 if text == "long" else f"{self.turns} of {self.problem.answer}"
        reward = float("nan") if text == "nan" else 0.5
        done = "perhaps" if text == "perhaps" else self.turns == 3
        return [{"role": "tool" if text != "number" else 7, "content": content}], reward, done

class NoEnvironment:
    pass
"""
SEES = """
import glob
found = []
for place in glob.glob("/proc/[0-9]*/environ"):
    try:
        found += [place] * (b"WHO=" in open(place, "rb").read())
    except OSError:
        pass
print(found)
"""
NAME = "counting_environment:Counter"
MESSAGE = {"role": "tool", "content": "5"}
needs_sandbox = pytest.mark.skipif(bool(sandbox.available().gaps(False)), reason="the kernel has no whole sandbox")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("environments")
    (folder / "counting_environment.py").write_text(BODY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # where users call specrl from
        yield folder


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[RewardPool]:
    found = RewardPool(DataConfig(reward_timeout_s=4.0, reward_workers=3), environment=NAME)
    yield found
    found.close()


def prompt(question: str = "Q", **entry: Any) -> Prompt:
    return Prompt(1, f"prompt of {question}", [1], "3", {"question": question, "generator": 0, "entry": entry})


def results(pool: RewardPool, *conversations: tuple[str, ...], asked: Prompt | None = None) -> list[Any]:
    scoring: Scoring = pool.begin(pool.config)
    for number, texts in enumerate(conversations):
        scoring.submit(number, asked or prompt(), texts)
    return list(scoring.results().values())


def test_an_environment_in_a_file_of_the_users_folder_answers_each_turn_from_the_beginning(pool: RewardPool) -> None:
    opened, first, last = results(pool, (), ("a",), ("a", "b", "c"), asked=prompt(level=2))
    assert opened == Turn(({"role": "user", "content": "count to 3"},))
    assert first == Turn(({"role": "tool", "content": "1 of 3"},), 0.5)
    assert last == Turn(({"role": "tool", "content": "3 of 3"},), 1.5, done=True)
    assert results(pool, ()) == [Turn()]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "raised ValueError: no answer to this"),
        ("hang", "took longer than data.reward_timeout_s = 4"),
        ("die", "ended its process 2 times (exit code 3)"),
        ("forge", "answered with something else than an outcome, which the response may have made it do"),
        ("long", "at most 65536 are allowed"),
        ("nan", "returned a reward that is not a finite number"),
        ("perhaps", "did not return True or False for whether the conversation is over"),
        ("number", "returned messages that are no list of tables with the texts role and content"),
    ],
)
def test_an_environment_that_fails_is_one_line_and_costs_its_own_conversation_alone(
    pool: RewardPool, text: str, reason: str
) -> None:
    failure, other = results(pool, ("a", text), ("a", "b"))
    assert isinstance(failure, RewardFailure) and reason in failure.reason and "\n" not in str(failure)
    assert f"response 'a / {text}'" in str(failure)
    assert other.reward == 1.0


def test_an_environment_that_cannot_begin_says_so(pool: RewardPool) -> None:
    (failure,) = results(pool, (), asked=prompt("broken"))
    assert failure.reason == "raised KeyError: 'no such problem'"


def test_failures_of_an_environment_are_named_after_it() -> None:
    tally = FailureTally.of([RewardFailure("Q", "A", "raised KeyError")])
    with pytest.raises(
        RewardError, match=r"environment.name = 'counting_environment:Counter' failed on all 1 responses"
    ):
        refuse_failure(tally, 1, DataConfig(), NAME)
    late = FailureTally.of([RewardFailure("Q", "A", "took longer", by_response=True)])
    refuse_failure(late, 1, DataConfig(reward="my:own"), "calculator")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("calculater", "it must be calculator, python or package.module:Class"),
        ("counting_environment:NoEnvironment", "has no methods reset(problem) and step(text)"),
        ("counting_environment:Missing", "cannot be imported"),
        ("nowhere.module:Class", "cannot be imported"),
    ],
)
def test_a_name_that_is_no_environment_is_refused_before_a_job_begins(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_scoring(parse_config({"name": "x", "environment": {"name": name}}))
    assert f'environment.name = "{name}"' in str(refused.value) and words in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        (7, 0.0, False),
        ([{"role": "tool"}], 0.0, False),
        ([{"role": "tool", "content": "\ud800"}], 0.0, False),
        ([], "1.0", False),
        ([], float("inf"), False),
        ([], 10**400, False),
        ([], None, False),
        ([], 0.0, 1),
    ],
)
def test_what_is_no_turn_is_refused(values: tuple[Any, Any, Any]) -> None:
    with pytest.raises(NotATurnError):
        Turn.of(*values)


def test_a_turn_comes_back_from_its_process_as_it_was_and_nothing_else_does() -> None:
    outcome = Outcome.of(Turn((MESSAGE,), 0.25, done=True))
    assert Outcome.parse(outcome.json()) == outcome
    for message in (b'{"turn": {"messages": 7, "reward": 0, "done": false}}', b'{"turn": [1]}', b'{"turn": {}}'):
        with pytest.raises(ValueError, match=r".*"):
            Outcome.parse(message)
    with pytest.raises(ValueError, match="no outcome"):
        Outcome.parse(b'{"turn": {"messages": [], "reward": 0, "done": false}, "parts": [1.0]}')


def test_an_environment_is_in_the_keys_of_the_stages_that_use_it_and_so_is_its_source(folder: Path) -> None:
    config = parse_config({"name": "x", "environment": {"name": NAME}})
    before, plain = run_keys(config, "code"), run_keys(parse_config({"name": "x"}), "code")
    assert before["train"] != plain["train"]
    source = folder / "counting_environment.py"
    source.write_text(BODY + "\n")
    changed = run_keys(config, "code")
    source.write_text(BODY)
    assert before["train"] != changed["train"] and config.import_paths == [NAME]


def test_settings_without_effect_beside_an_environment_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('name = "x"\n[environment]\nmax_turns = 7\n')
    with pytest.raises(ConfigError, match=r"environment.max_turns = 7 without environment.name"):
        load_config(file)
    file.write_text('name = "x"\n[environment]\nname = "calculator"\n[validate.sets.own]\nreward = "exact_match"\n')
    with pytest.raises(ConfigError, match=r'validate.sets.own.reward = "exact_match" with environment.name'):
        load_config(file)
    file.write_text('name = "x"\n[data]\nreward = "math_verify"\n[environment]\nname = "calculator"\n')
    with pytest.raises(ConfigError, match=r'data.reward = "math_verify" with environment.name = "calculator"'):
        load_config(file)


def test_the_calculators_configuration_is_whole() -> None:
    config: Config = load_config(ROOT / "configs" / "calculator.toml")
    check_scoring(config)
    assert config.environment.name == "calculator" and config.sampling.stop == ("=",)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("7 + 15", "22"),
        (" 2 - 3 - 4 ", "-5"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * -4", "-20"),
        ("-(1 - 2.5) / 3", "0.5"),
        ("1 / 3", "0.333333"),
        ("12 / 4 / 3", "1"),
        ("12 + 05", "17"),
        ("00.5 + 1.005 - 00", "1.505"),
        ("10 - -(-3)", "7"),
        ("--3", "3"),
    ],
)
def test_arithmetic_is_computed_exactly(expression: str, expected: str) -> None:
    assert written(value(expression)) == expected


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "1 / 0", "2 ** 3", "(1", "1)", "1 2", "- ", "9" * 16, "(" * 50 + "1", "-" * 100 + "1", "a + 1"],
)
def test_what_is_no_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(REFUSALS):
        value(expression)


def test_a_value_is_that_of_pythons_fractions() -> None:
    assert value("1.5 * (3 - 0.25) / 7") == Fraction("1.5") * (3 - Fraction("0.25")) / 7


def test_the_calculator_answers_calls_until_an_answer_is_stated() -> None:
    asked = Prompt(1, "", [], "26", {"question": "Q: 7 + 15 + 4\nA:", "generator": 0, "entry": {}})
    made = make_environment("calculator")
    first = play(made, asked, [" 7 + 15 ="])
    assert first == Turn(({"role": "tool", "content": " 22"},))
    assert play(made, asked, [" 7 + 15 =", ", 22 + 4 ="]) == Turn(({"role": "tool", "content": " 26"},))
    assert play(made, asked, [" 7 + 15 =", ", 22 + 4 =", ". Answer: 26"]) == Turn((), 1.0, done=True)
    assert play(made, asked, [". Answer: 25"]) == Turn((), 0.0, done=True)
    assert play(made, asked, ["no idea"]) == Turn((), 0.0, done=True)
    assert play(made, asked, ["1 / 0 ="]) == Turn(({"role": "tool", "content": " ?"},))


@pytest.mark.parametrize(
    ("turn", "written"),
    [
        ("That is. 12 + 30 =", "42"),
        ("1) 12 + 30 =", "42"),
        ("Step 2. 12 + 30 = ", "42"),
        ("So... 1) (12 + 30) =", "42"),
        ("0.5 + 1.5 =", "2"),
        ("1" + " + 1" * 24 + " =", "25"),
        ("1" + " + 1" * 30 + " =", "?"),
        ("9 - " * 100_000 + "1 =", "?"),
        ("1 + 2) - 3 =", "?"),
        ("3. - 4 =", "?"),
        ("1) + 2 =", "?"),
    ],
)
def test_the_calculator_finds_the_whole_expression_or_none(turn: str, written: str) -> None:
    calculator = Calculator()
    calculator.reset(Problem("Q", "1", ""))
    assert calculator.step(turn)[0] == [{"role": "tool", "content": f" {written}"}]


@pytest.mark.parametrize(
    ("turn", "reward"),
    [
        ("Answer: 12", 1.0),
        ("Answer: 12.", 1.0),
        ("Answer: 012, since", 1.0),
        ("Answer: 12.5", 0.0),
        ("Answer: 12,000", 0.0),
        ("Answer: 12/5", 0.0),
        ("Answer: 12. No: Answer: 12.5", 0.0),
    ],
)
def test_the_calculator_reads_the_whole_number_of_an_answer(turn: str, reward: float) -> None:
    calculator = Calculator()
    calculator.reset(Problem("Q", "12", ""))
    assert calculator.step(turn) == ([], reward, True)


def test_the_calculator_asks_what_the_problem_asks() -> None:
    assert Calculator().reset(Problem("Q", "1", "")) == []


@pytest.fixture(scope="module")
def programs() -> Iterator[RewardPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHO", "a-secret-of-the-test")
        found = RewardPool(DataConfig(reward_environment=("WHO",)), environment="python")
        yield found
        found.close()


def block(program: str) -> str:
    return f"I compute it:\n```python\n{program}\n```\n"


def output(text: str) -> Turn:
    return Turn(({"role": "tool", "content": f"\n```output\n{text}\n```\n"},))


@needs_sandbox
def test_a_program_reads_neither_the_answers_nor_anything_else_that_is_the_users(
    programs: RewardPool, tmp_path: Path
) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("the answer is 42")
    reads = f"print(open({str(answers)!r}).read())"
    started = f"import subprocess; print(subprocess.run(['cat', {str(answers)!r}], capture_output=True).stdout)"
    lists = f"import os; print(os.listdir({str(tmp_path)!r}))"
    works = (
        "import json, numpy, subprocess; print(subprocess.run(['echo', 'yes'], capture_output=True, text=True).stdout)"
    )
    found = results(programs, *((block(program),) for program in (reads, started, lists, works)))
    denied = "PermissionError: [Errno 13] Permission denied: {}"
    assert found == [
        output(denied.format(repr(str(answers)))),
        output("b''"),
        output(denied.format(repr(str(tmp_path)))),
        output("yes"),
    ]


@needs_sandbox
def test_python_runs_the_last_block_of_each_turn_until_an_answer_is_stated(programs: RewardPool) -> None:
    conversations = [
        (block("x = 2\nprint(x)"),),
        (block("print(1)"), block("print(2)") + "or rather\n" + block("print('Answer: 3')")),
        (block("print(3)"), "It is 3.\nAnswer: 3"),
        (block("print(3)") + "Answer: 4",),
        ("Answer: 3\n\nQuestion: and 2 + 2?\nAnswer: 4",),
        (
            block("open('kept', 'w').write('7')"),
            block("x = open('kept').read()"),
            block("print(open('kept').read(), x)"),
        ),
        (f"<think>{block('print(1)')}</think>{block('print(2)')}",),
        (f"<think>{block('print(1)')}Answer: 3",),
        ("no idea",),
    ]
    assert results(programs, *conversations) == [
        output("2"),
        output("Answer: 3"),
        Turn((), 1.0, done=True),
        Turn((), 0.0, done=True),
        Turn((), 1.0, done=True),
        output("NameError: name 'x' is not defined"),
        output("2"),
        Turn((), 0.0, done=True),
        Turn((), 0.0, done=True),
    ]


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("print(1)\nprint(1 / 0)", "1\nZeroDivisionError: division by zero"),
        ("print(1", "SyntaxError: '(' was never closed (program.py, line 1)"),
        ("print(1)\nraise SystemExit(3)", "1"),
        ("input()", "EOFError: EOF when reading a line"),
        ("pass", ""),
        ("print('x' * 5000 + 'y')", f"...{'x' * 1999}y"),
        ("bytearray(2**31)", "MemoryError:"),
        ("while True: pass", "(none: it was ended, at the latest after 5 s)"),
        ("import os\nos._exit(1)", "(none: it was ended, at the latest after 5 s)"),
        ("import os\nos.unlink('output')\nos.mkdir('output')", ""),
        (SEES, "\n[]\n"),
        ("import socket\nsocket.socket()", "PermissionError: [Errno 1] Operation not permitted"),
        ("open('/tmp/marker-of-a-test', 'w')", "Error: [Errno"),
    ],
)
def test_a_program_of_a_conversation_is_held_as_those_of_code_are(
    programs: RewardPool, program: str, shown: str
) -> None:
    (turn,) = results(programs, (block(program),))
    assert isinstance(turn, Turn) and not turn.done and turn.reward == 0
    assert shown in turn.messages[0]["content"]


@needs_sandbox
def test_programs_print_the_same_when_a_restart_runs_them_again(programs: RewardPool) -> None:
    """Mutation: with Python's isolated mode, in which PYTHONHASHSEED is ignored."""
    varying = "import random\nprint({str(n) for n in range(50)}, random.random(), object(), lambda: 0)"
    turns = results(programs, *[(block(varying),)] * 3)
    assert turns[0] == turns[1] == turns[2] and "<object object at 0x0>" in turns[0].messages[0]["content"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"reward_network": True}}, r'^data.reward_network = true: what environment.name = "python" runs may'),
        (
            {"data": {"reward_timeout_s": 20.0}},
            r"^data.reward_timeout_s = 20 with .*: it must be longer than 20, 5 for",
        ),
        ({"environment": {"name": "python", "max_turns": 6}}, r"of environment.max_turns = 6 turns$"),
    ],
)
def test_a_run_whose_programs_could_not_be_held_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_scoring(parse_config({"name": "x", "environment": {"name": "python"}, **settings}))
    assert "\n" not in str(error.value)


def test_python_counts_as_what_runs_a_models_code() -> None:
    config = DataConfig()
    named = {name: (runs_code(config, name), starts_processes(config, name)) for name in (None, "calculator", "python")}
    assert named == {None: ("", False), "calculator": ("", False), "python": ('environment.name = "python"', True)}
    with pytest.raises(
        ConfigError, match=r'^environment.name = "python" runs what a model writes, which on this machine'
    ):
        refuse_open_sandbox(sandbox.Confinement(False, False, 0, False), named["python"][0])


def test_prepare_refuses_an_open_sandbox_before_it_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: sandbox.Confinement(True, True, 6, False))
    data = {"source": "file", "path": "rows.jsonl", "reward": "exact_match"}
    sets = {"sets": {"programs": {"path": "tests.jsonl", "reward": "code"}}}
    cases: list[dict[str, Any]] = [{"environment": {"name": "python"}}, {"data": data, "validate": sets}]
    for sections in cases:
        config = parse_config({"name": "x", **sections})
        with pytest.raises(ConfigError, match="on this machine could start processes without end"):
            prepare.main(cast(StageContext, SimpleNamespace(config=config, continues=None)))


@pytest.mark.parametrize(("name", "entry"), [(NAME, {"level": 2}), ("calculator", {}), ("python", {})])
def test_the_other_columns_of_a_file_reach_an_environment_of_ones_own(
    name: str, entry: dict[str, int], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Q", "answer": "", "level": 2}\n')
    data = {"source": "file", "path": str(path), "reward": "exact_match"}
    config = parse_config({"name": "x", "environment": {"name": name}, "data": data})
    [problem] = read_problems(path, config, fit_all, Counts())
    assert problem.entry == entry


def test_the_guides_environment_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "guides" / "environments.md").read_text()
    (code,) = re.findall(r"^```python\n# my_env.py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_env.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    made, asked = make_environment("my_env:Guess"), Prompt(1, "", [], "7", {})
    assert play(made, asked, ["Is it 5?"]) == Turn(({"role": "user", "content": "It is larger."},))
    assert play(made, asked, ["Is it 5?", "7"]) == Turn((), 1.0, done=True)
