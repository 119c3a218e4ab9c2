"""Responses that attack what scores them: nothing that a model writes runs or changes the next one's score."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from flows.cli import invoke
from specrl.config import ConfigError, DataConfig, GeneratorConfig
from specrl.data.answers import extract_answer
from specrl.data.generators import ReasoningGym, make_generator
from specrl.data.problems import Problem, Prompt
from specrl.data.rewards import sandbox
from specrl.data.rewards.functions import judge, make_rewards
from specrl.data.rewards.pool import FailureTally, RewardError, RewardFailure, RewardPool, Scores, refuse_failure
from specrl.data.scorers import review
from specrl.data.scorers.review import REVIEWED
from tests.security.scorer_calls import REVIEWED_CALLS, dangerous_calls

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)
    from reasoning_gym.factory import DATASETS

NAMES = sorted(set(DATASETS) - {"composite"})  # no parameter of a configuration can name its parts
MARKER = "MARKER"
HOSTILE = (
    "__import__('os').system('touch MARKER')",
    "[open('MARKER', 'w') for _ in range(1)]",
    'exec("import reasoning_gym.games.countdown as c; c.CountdownDataset.score_answer = lambda *a: 1.0")',
    "9**9**8",
    "factorial(10**8)",
    "1e999999999",
    "9" * 20_000,
    "(" * 5_000 + "1" + ")" * 5_000,
    "[" * 100_000,
    "U999999999 A+999999999 B-999999999",
    "∧".join(f"a{number}" for number in range(60)),
    "\x1b[2J\x1b]0;title\x07\x00\x9b31m\ud800",
)
MORE = (
    "[].__class__.__base__.__subclasses__()",
    "(lambda: open('MARKER', 'w'))()",
    "((9**9)**9)**9**9",
    "sqrt(-1)**(10**10)",
    "x**x**x**9**9**9",
    "-" * 100_000 + "1",
    "<answer>" * 20_000,
    "Answer:" * 20_000,
)
"""For those that evaluate most."""
EVALUATING = sorted(REVIEWED_CALLS)
LATEX = (
    "9^{9^{9}}",
    "$9^{9^{9^{9}}}$",
    "$10^{10^{10}}!$",
    "$100000000!$",
    "$((9!)!)!$",
    "$\\frac{" * 500 + "1",
    "\\boxed{" * 2_000 + "1" + "}" * 2_000,
    "$" + "x^" * 900 + "x$",
    "9**9**8 + 1",
)


def problem_of(name: str, seed: int = 5) -> Problem:
    return next(iter(make_generator(GeneratorConfig(name=name)).problems(seed)))


def prompt_of(problem: Problem, index: int = 0) -> Prompt:
    metadata = {"question": problem.question, "generator": index, "entry": problem.entry}
    return Prompt(0, problem.question, [], problem.answer, metadata)


def score(pool: RewardPool, prompts: list[Prompt], responses: list[str]) -> Scores:
    scoring = pool.begin(pool.config)
    for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        scoring.submit(number, prompt, response)
    return scoring.wait()


# What the product knows of reasoning-gym


@pytest.mark.parametrize("name", NAMES)
def test_every_scorer_was_reviewed(name: str) -> None:
    assert name in REVIEWED
    assert dangerous_calls(DATASETS[name][0]) == REVIEWED_CALLS.get(name, set())


class Unreviewed(DATASETS["chain_sum"][0]):  # type: ignore[misc]
    """A scorer as the next version may bring it."""

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        import pickle

        import sympy
        import yaml

        value = eval(answer) or sympy.sympify(answer) or pickle.loads(answer.encode())
        return float(value or yaml.load(answer, yaml.Loader) or self.also(answer))

    def also(self, answer: str) -> Any:
        return exec(answer)


def test_a_scorer_that_evaluates_is_found_whatever_it_calls() -> None:
    assert dangerous_calls(Unreviewed) >= {"eval", "sympify", "loads", "load"}


def test_another_version_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(review, "VERSION", "0.1.2")
    with pytest.raises(
        ConfigError, match=r"^data\.generators: chain_sum cannot be used: .* for reasoning-gym 0\.1\.2, and 0\.1\.25 .*"
    ) as error:
        make_generator(GeneratorConfig(name="chain_sum"))
    assert "\n" not in str(error.value)


def test_a_generator_that_nobody_has_looked_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "new_puzzle", DATASETS["chain_sum"])
    with pytest.raises(ConfigError, match="new_puzzle cannot be used: its scorer has not been reviewed"):
        make_generator(GeneratorConfig(name="new_puzzle"))


@pytest.mark.parametrize("name", NAMES)
def test_right_answers_keep_the_score_of_the_library(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a generator of programs may leave files of theirs
    generator = make_generator(GeneratorConfig(name=name))
    assert isinstance(generator, ReasoningGym)
    problems = generator.problems(11)
    for problem in [next(problems) for _ in range(3)]:
        expected = generator._scorer.score_answer(extract_answer(problem.demonstration), deepcopy(problem.entry))
        assert generator.score(problem.demonstration, problem.answer, problem.entry) == expected


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("countdown", "({0})"),
        ("countdown", "+({0}) "),
        ("countdown", "{0}."),
        ("puzzle24", "(({0}))"),
        ("polynomial_multiplication", "2*({0})/2"),
        ("polynomial_multiplication", "({0}) + 0**3"),
        ("intermediate_integration", "({0}) + sin(2)**2 + cos(2)**2"),
        ("simple_integration", "3*({0})/3 + pi"),
    ],
)
def test_right_answers_may_be_any_expression(name: str, spelled: str) -> None:
    generator = make_generator(GeneratorConfig(name=name))
    problem = next(iter(generator.problems(3)))
    assert generator.score("Answer: " + spelled.format(problem.answer), problem.answer, problem.entry) == 1.0


@pytest.mark.parametrize("constant", ["c", "K", "C1", "C_1", "constant"])
def test_the_constant_of_integration_may_have_any_name(constant: str) -> None:
    problem = problem_of("simple_integration")
    spelled = problem.answer.replace("C", constant)
    generator = make_generator(GeneratorConfig(name="simple_integration"))
    assert generator.score(f"Answer: {spelled}", problem.answer, problem.entry) == 1.0


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "1 + NaNi"),
        ("number_sorting", re.sub(r"-?\d+(?:\.\d+)?", "nan", problem_of("number_sorting").answer)),
        ("number_sorting", re.sub(r"'-?\d+(?:\.\d+)?'", "NaN", problem_of("number_sorting").answer)),
        ("game_of_life_halting", "anything"),
    ],
)
def test_what_a_scorer_wrongly_takes_for_right_counts_as_wrong(name: str, answer: str) -> None:
    problem, generator = problem_of(name), make_generator(GeneratorConfig(name=name))
    assert generator.score(f"Answer: {answer}", problem.answer, problem.entry) == 0.0
    assert generator.score(f"Answer: {problem.answer}", problem.answer, problem.entry) == 1.0


@pytest.mark.parametrize(
    ("name", "share", "spelled"),
    [
        ("spiral_matrix", 0.1, lambda right: [int(item) for item in right.split()]),
        ("string_insertion", 0.1, list),
        ("n_queens", 0.5, lambda right: [row.split() for row in right.splitlines()]),
        ("binary_matrix", 0.1, lambda right: [[int(item) for item in row.split()] for row in right.splitlines()]),
    ],
)
def test_a_list_in_python_keeps_its_share(name: str, share: float, spelled: Callable[[str], object]) -> None:
    problem = problem_of(name)
    right = problem.entry["answer"]
    assert (
        make_generator(GeneratorConfig(name=name)).score(f"Answer: {spelled(right)!r}", right, problem.entry) == share
    )


def test_an_integral_that_the_library_leaves_as_it_is_counts_only_as_its_own_answer() -> None:
    generator = make_generator(GeneratorConfig(name="intermediate_integration"))
    entry = {"answer": "-Integral(x*cos(x), x) + C", "metadata": {"variable": "x", "integrand": "-x*cos(x)"}}
    assert generator.score(f"Answer: {entry['answer']}", str(entry["answer"]), entry) == 1.0
    assert generator.score("Answer: Integral(-x*cos(x), x)", str(entry["answer"]), entry) == 0.0
    assert generator.score("Answer: -x*sin(x) - cos(x)", str(entry["answer"]), entry) == 1.0


# Every generator, in the sandbox of a run


@pytest.fixture(scope="module")
def generators() -> Iterator[RewardPool]:
    config = DataConfig(generators=tuple(GeneratorConfig(name=name) for name in NAMES), reward_workers=1)
    pool = RewardPool(config)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_to_a_generator_runs_hangs_or_changes_the_next_score(
    name: str, generators: RewardPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problem, index = problem_of(name), NAMES.index(name)
    right = make_generator(GeneratorConfig(name=name)).score(
        problem.demonstration, problem.answer, deepcopy(problem.entry)
    )
    prompt, marker = prompt_of(problem, index), tmp_path / MARKER
    texts = (*HOSTILE, *(MORE if name in EVALUATING else ()))
    responses = [f"Answer: {text.replace(MARKER, str(marker))}" for text in texts]
    found = score(generators, [prompt] * (len(texts) + 1), [*responses, problem.demonstration])
    assert not marker.exists()
    assert found.failures == []
    assert all(0.0 <= reward <= 1.0 for reward in found.rewards)
    assert found.rewards[-1] == right


def test_what_a_scorer_breaks_on_is_a_failure_and_not_a_score(generators: RewardPool) -> None:
    """An entry without what the scorer needs: a library that has changed, not a response."""
    broken = Prompt(0, "", [], "1", {"generator": NAMES.index("countdown"), "entry": {"answer": "1"}})
    reward = make_rewards(DataConfig(generators=(GeneratorConfig(name="simple_integration"),)))[0]
    found = judge(reward, Prompt(0, "", [], "1", {"generator": 0, "entry": {"answer": "1"}}), "Answer: 1")
    assert found == "raised KeyError: 'metadata'"
    assert score(generators, [broken], ["Answer: x"]).rewards == [0.0]


@pytest.mark.parametrize("text", [*HOSTILE, *MORE, *LATEX])
def test_math_verify_is_not_held_up(text: str, math_verify: RewardPool, tmp_path: Path) -> None:
    marker = tmp_path / MARKER
    prompt = Prompt(0, "", [], "\\frac{1}{2}")
    started = time.monotonic()
    response = f"Answer: {text.replace(MARKER, str(marker))}"
    found = score(math_verify, [prompt] * 2, [response, "Answer: $\\frac{2}{4}$"])
    assert found.rewards == [0.0, 1.0] and not marker.exists()
    assert time.monotonic() - started < 600  # that is: it comes to an end


@pytest.fixture(scope="module")
def math_verify() -> Iterator[RewardPool]:
    pool = RewardPool(
        DataConfig(source="file", path=Path("rows"), reward="math_verify", reward_workers=1, reward_timeout_s=20)
    )
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "answer", ["2^{2023}", "x^2 + 1", "\\sqrt{2}", "10!", "\\binom{10}{3}", "e^{x^2}", "(n+1)!", "\\frac{10!}{(10-3)!}"]
)
def test_math_verify_keeps_what_answers_look_like(answer: str) -> None:
    reward = make_rewards(DataConfig(source="file", path=Path("rows"), reward="math_verify"))[0]
    assert judge(reward, Prompt(0, "", [], f"${answer}$"), f"Answer: ${answer}$") == 1.0


def test_exact_match_compares_text(tmp_path: Path) -> None:
    pool = RewardPool(DataConfig(source="file", path=Path("rows"), reward="exact_match", reward_workers=1))
    texts = [text.replace(MARKER, str(tmp_path / MARKER)) for text in (*HOSTILE, *MORE)]
    found = score(pool, [Prompt(0, "", [], "yes")] * (len(texts) + 1), [*texts, "Answer: yes"])
    pool.close()
    assert found.rewards == [0.0] * len(texts) + [1.0] and not (tmp_path / MARKER).exists()


# A reward of a user's that runs what the model writes

OWN = """
import os
from pathlib import Path

FACTOR = Path("factor.txt").read_text() if Path("factor.txt").exists() else "1"

def score(prompt, response, answer):
    scope = {"FACTOR": FACTOR}
    exec(response, scope)
    return scope["value"]
"""
ATTACKS: dict[str, tuple[str, str | float]] = {
    "write": ("open('FOLDER/MARKER', 'w')", "raised (OSError|PermissionError)"),
    "append": ("open('FOLDER/kept', 'a')", "raised (OSError|PermissionError)"),
    "remove": ("import os; os.remove('FOLDER/kept')", "raised (OSError|PermissionError)"),
    "rename": ("import os; os.rename('FOLDER/kept', 'FOLDER/MARKER')", "raised (OSError|PermissionError)"),
    "mode": ("import os; os.chmod('FOLDER/kept', 0o777)", "raised (OSError|PermissionError)"),
    "link": ("import os; os.symlink('/etc', 'FOLDER/MARKER')", "raised (OSError|PermissionError)"),
    "shell": ("import subprocess; value = subprocess.run(['touch', 'FOLDER/MARKER']).returncode", 1.0),
    "secret": ("import os; value = float('HF_TOKEN' in os.environ)", 0.0),
    "secret of the rank": ("value = float(b'HF_TOKEN' in open('/proc/RANK/environ', 'rb').read())", "raised"),
    "connect": ("import socket; socket.create_connection(('127.0.0.1', PORT), 5)", "raised"),
    "socket": ("import socket; socket.socket()", "raised PermissionError"),
    "patch": (
        "import specrl.data.rewards.functions as f, builtins\nf.judge = lambda *a: 1.0\nbuiltins.float = int",
        "rais",
    ),
    "module": ("import sys; sys.modules['own_reward'].score = lambda *a: 1.0", "raised KeyError"),
    "leave": ("import os; os._exit(0)", r"ended its process 2 times \(exit code 0\)"),
    "kill": ("import os; os.kill(os.getpid(), 9)", "ended its process 2 times"),
    "parent": ("import os\ntry:\n  os.kill(os.getppid(), 9)\nexcept OSError: pass\nvalue = 0.25", 0.25),
    "bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "took longer"),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    time.sleep(9876)\nvalue = 0.5",
        0.5,
    ),
    "threads": (
        "import threading, time\nfor _ in range(3000): threading.Thread(target=time.sleep, args=(999,)).start()",
        "raised RuntimeError|took longer|ended",
    ),
    "memory": ("value = len(bytearray(50 * 2**30))", "raised MemoryError"),
    "number": ("value = 10**5000", "returned"),
    "digits": ("value = str(9**9**8)", "took longer"),
    "deep": ("value = eval('(' * 10**5 + '1')", "raised"),
    "flood": ("import sys\nwhile True: sys.stdout.write('x' * 10**6)", "took longer"),
    "text": ("value = 'x' * 10**8", "returned 'xxxx"),
    "message": ("raise ValueError('x' * 10**8)", "raised ValueError: xxx"),
    "escapes": ("raise ValueError('\\x1b[2J\\x07\\r\\x9b31m')", r"raised ValueError: \\x1b\[2J\\x07 \\x9b31m"),
    "strange error": (
        "class E(Exception):\n  def __str__(self): raise ZeroDivisionError\nraise E",
        "raised E: something",
    ),
    "strange value": ("class V:\n  def __float__(self): raise ZeroDivisionError\nvalue = V()", "returned"),
    "garbage": ("import os\nfor n in range(3, 99):\n  try: os.write(n, b'{' * 99)\n  except OSError: pass", "answered"),
    "pickle": (
        "import os, pickle\nfor n in range(3, 99):\n  try: os.write(n, pickle.dumps(1.0))\n  except OSError: pass",
        "answered",
    ),
    "long answer": (
        "import os\nfor n in range(3, 99):\n  try: os.write(n, b'[' * 150000)\n  except OSError: pass",
        "answ",
    ),
    "deaf": ("import os, time\nos.closerange(3, 99)\ntime.sleep(999)", "took longer"),
    "disk": (
        "for n in range(9): open(str(n), 'wb').write(bytes(100 * 2**20))",
        "raised (OSError|KeyError)|took longer",
    ),
    "folders": ("import os\nfor n in range(1100):\n  os.mkdir('d'); os.chdir('d')\nvalue = 0.75", 0.75),
    "priority": ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); value = 0.5", 0.5),
    "mount": ("import ctypes; value = ctypes.CDLL(None).unshare(0x10000000)", -1.0),
    "trace": ("import ctypes; value = ctypes.CDLL(None).ptrace(16, RANK, 0, 0)", -1.0),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_reward.py").write_text(OWN)
    (folder / "factor.txt").write_text("3")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.chdir(folder)
        patch.setenv("HF_TOKEN", "secret")
        patch.setenv("NAMED", "named")
        config = DataConfig(
            source="file",
            path=Path("rows"),
            reward="own_reward:score",
            reward_workers=1,
            reward_timeout_s=3.0,
            reward_on_failure=-5.0,
            reward_environment=("NAMED",),
        )
        pool = RewardPool(config)
        pool.wait_until_ready()
        yield pool
        pool.close()


@pytest.mark.parametrize("name", ATTACKS)
def test_code_that_a_reward_runs_harms_its_own_response_alone(name: str, own: RewardPool, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "kept").chmod(0o600)
    code, expected = ATTACKS[name]
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = {"FOLDER": str(tmp_path), "RANK": str(os.getpid()), "PORT": str(server.getsockname()[1])}
        for word, value in {**places, MARKER: MARKER}.items():
            code = code.replace(word, value)
        prompt = Prompt(0, "", [], "")
        found = score(own, [prompt] * 2, [code, "import os; value = int(FACTOR) / 4 if os.listdir() == [] else 9"])
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "kept" and (tmp_path / "kept").stat().st_mode & 0o777 == 0o600
    assert found.rewards[1] == 0.75
    if isinstance(expected, float):
        assert found.failures == [] and found.rewards[0] == expected
    else:
        assert found.rewards[0] == -5.0
        [failure] = found.failures
        assert re.match(expected, failure.reason), failure.reason
        assert str(failure).isprintable() and len(str(failure)) < 1000


def test_a_reward_sees_what_it_is_promised(own: RewardPool) -> None:
    texts = [
        "import os; value = float(os.environ['NAMED'] == 'named' and os.environ['HOME'] == os.environ['TMPDIR'])",
        "from pathlib import Path; Path('here').write_text('x'); value = float(Path('here').read_text() == 'x')",
        "import subprocess, sys; value = float(subprocess.check_output([sys.executable, '-c', 'print(0.5)']))",
        "import tempfile; f = tempfile.NamedTemporaryFile(); value = 1.0",
        "import threading; t = threading.Thread(target=print); t.start(); t.join(); value = 1.0",
    ]
    found = score(own, [Prompt(0, "", [], "")] * len(texts), texts)
    assert (found.rewards, found.failures) == ([1.0, 1.0, 0.5, 1.0, 1.0], [])


@pytest.mark.skipif(not sandbox.available().namespaces, reason="the kernel gives this user no namespaces")
def test_a_reward_has_the_locks_of_multiprocessing_and_no_shared_memory_of_others(own: RewardPool) -> None:
    """Mutation: the worker's handler of SIGTERM, with which a pool waits for ever now and then."""
    begin = "import multiprocessing as m, os, time\nothers = len(os.listdir('/dev/shm'))\n"
    texts = [
        f"{begin}with m.Pool(2) as p: value = sum(p.map(abs, [1, -1])) - others",
        f"{begin}p = m.Process(target=time.sleep, args=(60,)); p.start(); p.terminate(); p.join(); value = 1",
    ]
    found = score(own, [Prompt(0, "", [], "")] * 2, texts)
    assert (found.rewards, found.failures) == ([2.0, 1.0], [])


def test_the_network_can_be_asked_for(own: RewardPool) -> None:
    pool = RewardPool(own.config.model_copy(update={"reward_network": True}))
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5); value = 1"
        found = score(pool, [Prompt(0, "", [], "")], [code])
    pool.close()
    assert (found.rewards, found.failures) == ([1.0], [])


# The parts of the sandbox, each for itself

HELD = [sandbox.Confinement(False, False, sandbox.landlock_version(), True)]
DENIED = (
    "open(FOLDER + '/MARKER', 'w')",
    "os.rename(FOLDER + '/kept', FOLDER + '/MARKER')",
    "os.chmod(FOLDER + '/kept', 0o777)",
    "socket.socket()",
    "os.fork()",
    "os.execv('/bin/true', ['true'])",
    "os.kill(-1, 0)",
    "os.kill(PARENT, 0)",
    "open(f'/proc/{PARENT}/environ').read()",
)


@pytest.mark.skipif(sandbox.landlock_version() < 6, reason="the kernel's Landlock lacks scopes")
@pytest.mark.parametrize("code", DENIED)
def test_landlock_and_the_filter_hold_without_namespaces(code: str, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    (tmp_path / "scratch").mkdir()
    scope = {"os": os, "socket": socket, "FOLDER": str(tmp_path), "PARENT": os.getpid()}
    child = os.fork()
    if not child:
        result = 2
        try:
            sandbox.confine(tmp_path / "scratch", HELD[0], network=False, processes=False)
            (tmp_path / "scratch" / "own").write_text("x")
            result = 1
            exec(code, scope)
        except PermissionError:
            result = 0 if result == 1 else result
        finally:
            os._exit(result)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "scratch"]


def test_what_a_kernel_does_not_hold_is_named() -> None:
    assert sandbox.Confinement(True, True, 7, True).gaps(network=False) == ""
    assert sandbox.Confinement(True, True, 0, True).gaps(network=False) == ""
    assert "use the network" in sandbox.Confinement(False, False, 0, False).gaps(network=False)
    assert "network" not in sandbox.Confinement(False, False, 0, False).gaps(network=True)


# A run goes on


def test_a_policy_cannot_end_its_run_by_what_it_writes() -> None:
    """Neither with responses that take too long for a built-in reward, nor once an own reward has given a number."""
    late = [RewardFailure("Q", "A", "took longer", by_response=True)] * 3
    refuse_failure(FailureTally.of(late), 3, DataConfig())
    with pytest.raises(RewardError, match="failed on all 3 responses"):
        refuse_failure(FailureTally.of([*late[:2], RewardFailure("Q", "A", "raised KeyError")]), 3, DataConfig())


def test_an_own_reward_that_has_given_a_number_is_not_broken(own: RewardPool) -> None:
    pool = RewardPool(own.config)
    prompts = [Prompt(0, "", [], "")] * 20
    assert score(pool, prompts, ["value = 0.5", *["import os; os._exit(0)"] * 18, "value = 0.25"]).rewards[-1] == 0.25
    pool.close()


# The command

CONFIG = 'name = "trial"\n[data]\ngenerators = [{ name = "countdown" }]\n'


def test_the_command_scores_as_a_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    (tmp_path / "hostile").write_text(f"Answer: __import__('os').system('touch {tmp_path}/MARKER')\x1b[2J")
    command = ["reward", str(tmp_path / "c.toml"), "--json", str(tmp_path / "out.json"), "--response"]
    assert invoke([*command, str(tmp_path / "hostile"), "--problem", "1"]) == 0
    shown = capsys.readouterr().out
    assert "score: 0 in " in shown and "\x1b" not in shown and not (tmp_path / MARKER).exists()
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["problem"], found["score"], found["error"]) == (1, 0.0, None)
    (tmp_path / "right").write_text(f"Answer: {found['answer']}")
    assert invoke([*command, str(tmp_path / "right"), "--problem", "1"]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["score"] == 1.0


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("import sys; sys.exit(0)", 2),
        ("import os; os._exit(0)", 2),
        ("print('loaded', flush=True)\ndef score(*texts): return 0.5", 0),
    ],
)
def test_the_command_imports_a_reward_in_its_sandbox_alone(
    module: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tried_reward.py").write_text(module)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "1"}}\n' for n in range(8)))
    (tmp_path / "c.toml").write_text(
        'name = "x"\n[data]\nsource = "file"\npath = "rows.jsonl"\nreward = "tried_reward:score"\n'
    )
    assert invoke(["reward", "c.toml", "--response", "c.toml", "--json", "-"]) == code
    shown = capfd.readouterr()
    if code:
        assert "data.reward = 'tried_reward:score'" in shown.err.replace('"', "'") and shown.err.count("\n") == 1
    else:
        assert json.loads(shown.out)["score"] == 0.5 and "loaded" in shown.err
    assert "tried_reward" not in sys.modules


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"9" * 20_000_000, None])
def test_a_file_that_is_no_response_is_one_line(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    assert invoke(["reward", str(tmp_path / "c.toml"), "--response", str(tmp_path / "file")]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("specrl: --response ") and complaint.count("\n") == 1
