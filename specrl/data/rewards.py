"""Rewards: how good a response is, as a number. A reward judges whatever a model writes, and never stops the run."""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable

from specrl.config import ConfigError, DataConfig
from specrl.config.importing import import_function
from specrl.data.answers import normalise, stated_answer
from specrl.data.generators import make_generator
from specrl.data.prompts import Prompt

logger = logging.getLogger(__name__)

Reward = Callable[[Prompt, str], float]
RewardFunction = Callable[[str, str, str], float]
"""(prompt, response, answer) -> reward; all three are text."""

MATH_VERIFY_SECONDS = 5
_REGISTERED: dict[str, RewardFunction] = {}


def register_reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Return the decorator that registers a reward under `name` for `data.reward`.

    Raises:
        ValueError: another reward has the name.
    """

    def decorate(function: RewardFunction) -> RewardFunction:
        if name == "task" or name in _REGISTERED:
            raise ValueError(f"a reward is registered as {name!r} already")
        _REGISTERED[name] = function
        return function

    return decorate


def make_reward(config: DataConfig) -> Reward:
    """Return the reward of `data.reward`: a finite number for every response, 0 where the scorer itself fails.

    Raises:
        ConfigError: the scorer does not exist, or does not fit the data source.
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
    generators = [make_generator(generator) for generator in config.generators]

    def reward(prompt: Prompt, response: str) -> float:
        index: int = prompt.metadata["generator"]
        return generators[index].score(response, prompt.answer, prompt.metadata["entry"])

    return reward


@register_reward("math_verify")
def math_verify(_: str, response: str, answer: str) -> float:
    """Return 1 if the stated answer equals the true one as a mathematical expression.

    Only the stated answer is judged, so that numbers on the way to it do not count.
    """
    from math_verify import parse, verify

    # math-verify limits its time with SIGALRM, which only the main thread may set; elsewhere it runs without a limit.
    seconds = MATH_VERIFY_SECONDS if threading.current_thread() is threading.main_thread() else None
    gold = parse(answer, parsing_timeout=seconds) or parse(f"${answer}$", parsing_timeout=seconds)
    return float(verify(gold, parse(stated_answer(response), parsing_timeout=seconds), timeout_seconds=seconds))


@register_reward("exact_match")
def exact_match(_: str, response: str, answer: str) -> float:
    """Return 1 if the stated answer is the true one but for case, spaces and separators."""
    return float(normalise(stated_answer(response)) == normalise(answer))


def _imported(path: str) -> RewardFunction:
    """Return the function behind an import path.

    Raises:
        ConfigError: it is no import path, nothing is there, or it is not callable with (prompt, response, answer).
    """
    if ":" not in path:
        known = ", ".join(["task", *_REGISTERED])
        raise ConfigError(f'data.reward = "{path}": must be {known} or package.module:function')
    function: RewardFunction = import_function("data.reward", path)
    try:
        inspect.signature(function).bind("prompt", "response", "answer")
    except (TypeError, ValueError) as error:
        raise ConfigError(f'data.reward = "{path}" does not take (prompt, response, answer): {error}') from error
    return function


def _guarded(reward: Reward) -> Reward:
    failed: set[str] = set()

    def guarded(prompt: Prompt, response: str) -> float:
        try:
            value = reward(prompt, response)
        except Exception as error:  # scorers parse arbitrary text: whatever breaks them is not a right answer
            if type(error).__name__ not in failed:
                failed.add(type(error).__name__)
                logger.warning("reward failed and counts as 0 (logged once per kind): %r", error)
            return 0.0
        return value if math.isfinite(value) else 0.0

    return guarded
