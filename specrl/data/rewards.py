"""Rewards: numbers that say how good a response is. A reward must judge any text, and its failure never stops a run."""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable

from specrl.config import ConfigError, DataConfig
from specrl.config.importing import import_function
from specrl.data.answers import extract_answer, normalise
from specrl.data.generators import make_generator
from specrl.data.prompts import Prompt

logger = logging.getLogger(__name__)

Reward = Callable[[Prompt, str], float]
"""(prompt, response) -> reward, a finite number."""
RewardFunction = Callable[[str, str, str], float]
"""(prompt, response, answer) -> reward; all three are text."""

MATH_VERIFY_SECONDS = 5
"""The time limit for each step of the comparison of two mathematical expressions."""
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
    """Return the reward of `data.reward`: a finite number for every response, 0 where the scorer itself fails.

    Raises:
        ConfigError: There is no such reward, or it does not fit the source of the data.
    """
    if config.reward == "task":
        if config.source != "generators":
            raise ConfigError(
                'data.reward = "task" is a generator\'s own scorer; with data.source = "file" use one of '
                f"{', '.join(_REGISTERED)}, or an import path package.module:function"
            )
        return _guarded(_task_reward(config))
    function = _REGISTERED.get(config.reward) or _imported(config.reward)
    return _guarded(lambda prompt, response: float(function(prompt.text, response, prompt.answer)))


def _task_reward(config: DataConfig) -> Reward:
    """Return the reward that each generator's own scorer gives."""
    generators = [make_generator(generator) for generator in config.generators]

    def reward(prompt: Prompt, response: str) -> float:
        index: int = prompt.metadata["generator"]
        return generators[index].score(response, prompt.answer, prompt.metadata["entry"])

    return reward


@register_reward("math_verify")
def math_verify(_: str, response: str, answer: str) -> float:
    """Return 1 if the stated answer equals the true one as a mathematical expression, else 0.

    Only the stated answer is judged, so that numbers on the way to it do not count.
    """
    from math_verify import parse, verify

    # math-verify limits its time with SIGALRM, which only the main thread may set; elsewhere it runs without a limit.
    seconds = MATH_VERIFY_SECONDS if threading.current_thread() is threading.main_thread() else None
    gold = parse(answer, parsing_timeout=seconds) or parse(f"${answer}$", parsing_timeout=seconds)
    return float(verify(gold, parse(extract_answer(response), parsing_timeout=seconds), timeout_seconds=seconds))


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


def _guarded(reward: Reward) -> Reward:
    """Return a reward that is 0 where the given one raises or is not finite."""
    failed: set[str] = set()

    def guarded(prompt: Prompt, response: str) -> float:
        try:
            value = reward(prompt, response)
        except Exception as error:  # scorers parse arbitrary text: a response that breaks one is not a right answer
            if type(error).__name__ not in failed:
                failed.add(type(error).__name__)
                logger.warning("data.reward raised an error, which counts as 0 (logged once for each type): %r", error)
            return 0.0
        return value if math.isfinite(value) else 0.0

    return guarded
