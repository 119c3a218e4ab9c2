"""Rewards: numbers that say how good a response is. They run in worker processes, see `rewards.pool`."""

from __future__ import annotations

import inspect
import reprlib
import threading
from collections.abc import Callable
from typing import Any

from specrl.config import ConfigError, DataConfig
from specrl.config.base import import_function
from specrl.data.answers import extract_answer, normalise
from specrl.data.generators import make_generator
from specrl.data.problems import Prompt
from specrl.data.scorers.expressions import NotAnAnswerError, bounded_latex

Reward = Callable[[Prompt, str], float]
"""(prompt, response) -> reward; whatever a user's function returns, `judge` checks it."""
RewardFunction = Callable[[str, str, str], float]
"""(prompt, response, answer) -> reward; all three are text."""

MATH_VERIFY_SECONDS = 5
"""The time limit for each step of the comparison of two mathematical expressions."""
LARGEST = 3.4e38
"""The largest reward, by its size: rollouts keep rewards as 32-bit numbers."""
_REGISTERED: dict[str, RewardFunction] = {}


def register_reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Return the decorator that registers a reward under `name` for `data.reward`.

    Raises:
        ValueError: Another reward is registered under the name.
    """

    def decorate(function: RewardFunction) -> RewardFunction:
        if name == "task" or name in _REGISTERED:
            raise ValueError(f"data.reward: another reward is already registered as {name!r}")
        _REGISTERED[name] = function
        return function

    return decorate


def make_reward(config: DataConfig) -> Reward:
    """Return the reward of `data.reward`, which may raise, return anything, hang or end its process.

    Raises:
        ConfigError: There is no such reward, or it does not fit the source of the data.
    """
    if config.reward == "task":
        if config.source != "generators":
            raise ConfigError(
                'data.reward = "task" is a generator\'s own scorer; with data.source = "file" use one of '
                f"{', '.join(_REGISTERED)}, or an import path package.module:function"
            )
        return _task_reward(config)
    function = _REGISTERED.get(config.reward) or _imported(config.reward)
    return lambda prompt, response: function(prompt.text, response, prompt.answer)


def warm_up(config: DataConfig, reward: Reward) -> None:
    """Let a built-in reward import and cache what it needs before the process is forked: it scores a right answer."""
    if config.reward == "task":
        for index, generator in enumerate(config.generators):
            problem = next(iter(make_generator(generator).problems(0)))
            metadata = {"generator": index, "entry": problem.entry}
            judge(reward, Prompt(0, problem.question, [], problem.answer, metadata), problem.demonstration)
    elif is_built_in(config):
        judge(reward, Prompt(0, "", [], "$\\frac{1}{2} + x^2$"), "Answer: $x^2 + 1/2$")


def _task_reward(config: DataConfig) -> Reward:
    """Return the reward that each generator's own scorer gives."""
    generators = [make_generator(generator) for generator in config.generators]

    def reward(prompt: Prompt, response: str) -> float:
        index: int = prompt.metadata["generator"]
        return generators[index].score(response, prompt.answer, prompt.metadata["entry"])

    return reward


def is_built_in(config: DataConfig) -> bool:
    """Return whether `data.reward` is one of specrl's, not a function that the user has written."""
    return ":" not in config.reward


def judge(reward: Reward, prompt: Prompt, response: str) -> float | str:
    """Return the reward of a response or, where it fails, one line that says why.

    It fails where it raises or returns what is not a finite number.
    """
    try:
        value: Any = reward(prompt, response)
    except (Exception, SystemExit) as error:  # foreign code, which one response may break and the next one not
        return f"raised {shortened(type(error).__name__)}: {_text(error)}"
    try:
        number = float("nan") if isinstance(value, str | bytes) else float(value)
    except Exception:  # of whatever it has returned
        number = float("nan")
    return number if abs(number) <= LARGEST else f"returned {_text(value)}, which is not a finite number"


def _text(thing: object) -> str:
    """Return an error's message or a value's text on one line, whatever its class makes of being asked for it."""
    try:
        return shortened(str(thing) if isinstance(thing, BaseException) else reprlib.repr(thing))
    except Exception:
        return "something that has no text"


def shortened(text: str, limit: int = 120) -> str:
    """Return a text on one line, with its middle left out where it has more than `limit` characters.

    What is not printable, and could act on a terminal, is written as its escape sequence.
    """
    ends = text if len(text) <= 20 * limit else f"{text[: 10 * limit]} {text[-10 * limit :]}"
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(ends.split()))
    return line if len(line) <= limit else f"{line[: limit // 2]} ... {line[-limit // 2 :]}"


@register_reward("math_verify")
def math_verify(_: str, response: str, answer: str) -> float:
    """Return 1 if the stated answer equals the true one as a mathematical expression, else 0.

    Only the stated answer is judged, so that numbers on the way to it do not count.
    """
    from math_verify import parse, verify

    # math-verify limits its time with SIGALRM, which only the main thread may set; elsewhere it runs without a limit.
    seconds = MATH_VERIFY_SECONDS if threading.current_thread() is threading.main_thread() else None
    try:
        stated = bounded_latex(extract_answer(response))
    except NotAnAnswerError:
        return 0.0
    gold = parse(answer, parsing_timeout=seconds) or parse(f"${answer}$", parsing_timeout=seconds)
    return float(verify(gold, parse(stated, parsing_timeout=seconds), timeout_seconds=seconds))


@register_reward("exact_match")
def exact_match(_: str, response: str, answer: str) -> float:
    """Return 1 if the stated answer is the true one, else 0; case, spaces and thousands separators do not count."""
    return float(normalise(extract_answer(response)) == normalise(answer))


def _imported(path: str) -> RewardFunction:
    """Return the function behind an import path.

    Raises:
        ConfigError: It is no import path, nothing is there, or it is not callable with (prompt, response, answer).
    """
    if ":" not in path:
        known = ", ".join(["task", *_REGISTERED])
        raise ConfigError(f'data.reward = "{path}": it must be {known} or package.module:function')
    function: RewardFunction = import_function("data.reward", path)
    try:
        inspect.signature(function).bind("prompt", "response", "answer")
    except (TypeError, ValueError) as error:
        raise ConfigError(f'data.reward = "{path}" does not take (prompt, response, answer): {error}') from error
    return function
