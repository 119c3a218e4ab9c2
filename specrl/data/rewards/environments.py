"""Environments, with which a policy talks turn by turn. They run in the reward processes; see `rewards.pool`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specrl.config import Config, ConfigError
from specrl.config.base import import_function
from specrl.data.problems import Problem, Prompt
from specrl.data.rewards.calculator import Calculator
from specrl.data.rewards.functions import LARGEST, make_rewards, raised, refuse_network, runs_code
from specrl.data.rewards.interpreter import SECONDS, Python


class Environment(Protocol):
    """One conversation. Each turn replays it from the start in a new process, so it must be deterministic."""

    def reset(self, problem: Problem) -> list[dict[str, str]]:
        """Begin; return the messages of the prompt, or an empty list for the problem's own prompt.

        A problem has the `question`, the reference `answer`, and the other columns of its row in `entry`.
        """
        ...

    def step(self, text: str) -> tuple[list[dict[str, str]], float, bool]:
        """Answer a turn of the policy: messages before its next turn, this turn's reward, whether it was the last."""
        ...


class NotATurnError(ValueError):
    """An environment's return value is no turn."""


EnvironmentClass = Callable[[], Environment]
BUILT_IN: dict[str, EnvironmentClass] = {"calculator": Calculator, "python": Python}
"""specrl's own environments, by their `environment.name`."""


@dataclass(frozen=True)
class Turn:
    """An environment's reply to a conversation so far."""

    messages: tuple[dict[str, str], ...] = ()
    reward: float = 0.0
    """The sum over the policy's turns."""
    done: bool = False

    @classmethod
    def of(cls, messages: Any, reward: Any, done: Any) -> Turn:
        """Make a turn from values that a user's environment returned, or that came from its process.

        Raises:
            NotATurnError: They are not messages of `role` and `content`, a finite number and a bool.
        """
        if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
            raise NotATurnError("returned messages that are no list of tables with the texts role and content")
        try:
            total = float(reward)
        except (OverflowError, TypeError, ValueError):
            total = math.nan
        if not abs(total) <= LARGEST or isinstance(reward, str):
            raise NotATurnError("returned a reward that is not a finite number")
        if not isinstance(done, bool):
            raise NotATurnError("did not return True or False for whether the conversation is over")
        return cls(tuple({"role": message["role"], "content": message["content"]} for message in messages), total, done)


def _is_message(value: Any) -> bool:
    texts = [value.get(key) for key in ("role", "content")] if isinstance(value, dict) else [None]
    return all(isinstance(one, str) and not any("\ud800" <= char <= "\udfff" for char in one) for one in texts)


def make_environment(name: str) -> EnvironmentClass:
    """Make the environment `environment.name`; raise ConfigError if there is none."""
    if (built_in := BUILT_IN.get(name)) is not None:
        return built_in
    if ":" not in name:
        known = ", ".join(BUILT_IN)
        raise ConfigError(f'environment.name = "{name}": it must be {known} or package.module:Class')
    found: EnvironmentClass = import_function("environment.name", name)
    if not all(callable(getattr(found, method, None)) for method in ("reset", "step")):
        raise ConfigError(f'environment.name = "{name}" has no methods reset(problem) and step(text)')
    return found


def check_scoring(config: Config) -> None:
    """Check that the environment (or without one the reward) can be imported and called as in a run."""
    name, data, turns = config.environment.name, config.data, config.environment.max_turns
    if name is None:
        make_rewards(data)
        return
    make_environment(name)
    refuse_network(data, name)
    if runs_code(data, name) and data.reward_timeout_s <= turns * SECONDS:
        raise ConfigError(
            f'data.reward_timeout_s = {data.reward_timeout_s:g} with environment.name = "{name}": it must be longer '
            f"than {turns * SECONDS:g}, {SECONDS:g} for the program of each of environment.max_turns = {turns} turns"
        )


def play(made: EnvironmentClass, prompt: Prompt, texts: Sequence[str]) -> Turn | str:
    """Replay a conversation from its start; return the outcome of its last turn, or why the environment failed."""
    metadata = prompt.metadata
    problem = Problem(metadata.get("question", prompt.text), prompt.answer, "", metadata.get("entry") or {})
    try:
        environment = made()
        turn = Turn.of(environment.reset(problem), 0.0, False)
        for text in texts:
            messages, reward, done = environment.step(text)
            now = Turn.of(messages, reward, done)
            turn = Turn.of(now.messages, turn.reward + now.reward, now.done)
    except NotATurnError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # foreign code: it may fail on one conversation and not on the next
        return raised(error)
    return turn
