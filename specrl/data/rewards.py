"""Rewards: how good a response is, as a number. A scorer judges arbitrary model output and never stops the run."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specrl.config import ConfigError, DataConfig
from specrl.data.answers import normalise, stated_answer
from specrl.data.generators import make_generator
from specrl.data.prompts import Prompt

logger = logging.getLogger(__name__)

Reward = Callable[[Prompt, str], float]
MATH_VERIFY_SECONDS = 5


def make_reward(config: DataConfig) -> Reward:
    """The reward of `data.reward`. It returns a finite number for every response, 0 where the scorer itself fails.

    Raises:
        ConfigError: the scorer does not exist, or does not fit the data source.
    """
    if config.reward == "task":
        if config.source != "generators":
            raise ConfigError(
                'data.reward = "task" is a generator\'s own scorer; with data.source = "file" use "math_verify", '
                '"exact_match" or an import path package.module:function'
            )
        return _guarded(_task_reward(config))
    if config.reward == "math_verify":
        return _guarded(_math_verify)
    if config.reward == "exact_match":
        return _guarded(_exact_match)
    return _guarded(_imported(config.reward))


def _task_reward(config: DataConfig) -> Reward:
    generators = [make_generator(generator) for generator in config.generators]

    def reward(prompt: Prompt, response: str) -> float:
        index: int = prompt.metadata["generator"]
        return generators[index].score(response, prompt.answer, prompt.metadata["entry"])

    return reward


def _exact_match(prompt: Prompt, response: str) -> float:
    return float(normalise(stated_answer(response)) == normalise(prompt.answer))


def _math_verify(prompt: Prompt, response: str) -> float:
    """Symbolic equality. The stated answer is judged, so that numbers on the way to it do not count."""
    from math_verify import parse, verify

    # math-verify limits its time with SIGALRM, which only the main thread may set; elsewhere it runs without a limit.
    seconds = MATH_VERIFY_SECONDS if threading.current_thread() is threading.main_thread() else None
    gold = parse(prompt.answer, parsing_timeout=seconds) or parse(f"${prompt.answer}$", parsing_timeout=seconds)
    return float(verify(gold, parse(stated_answer(response), parsing_timeout=seconds), timeout_seconds=seconds))


def _imported(path: str) -> Reward:
    """A function of the user's, called as `function(prompt, response, answer)` with the prompt's text."""
    function = import_reward(path)

    def reward(prompt: Prompt, response: str) -> float:
        return float(function(prompt.text, response, prompt.answer))

    return reward


def import_reward(path: str) -> Callable[[str, str, str], Any]:
    """
    Raises:
        ConfigError: not an import path, nothing there, or not callable with (prompt, response, answer).
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise ConfigError(f"data.reward = {path!r}: must be task, math_verify, exact_match or package.module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a console script does not look there, and users keep their rewards there
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"data.reward = {path!r} cannot be imported: {error}") from error
    try:
        inspect.signature(function).bind("prompt", "response", "answer")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data.reward = {path!r} does not take (prompt, response, answer): {error}") from error
    result: Callable[[str, str, str], Any] = function
    return result


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
