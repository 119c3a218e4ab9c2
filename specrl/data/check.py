"""Checks of data and reward before a run begins."""

from __future__ import annotations

from specrl.config import Config
from specrl.config.base import prefixed
from specrl.data.answers import close_thoughts
from specrl.data.files import read_requests
from specrl.data.held_out import config_of_set, held_out_problems, make_problems
from specrl.data.problems import fit_all
from specrl.data.rendering import check_template
from specrl.data.rewards import sandbox
from specrl.data.rewards.code import refuse_open_sandbox
from specrl.data.rewards.environments import check_scoring
from specrl.data.rewards.functions import runs_code
from specrl.data.rewards.trial import Trial, try_reward

PATIENCE_S = 5.0  # for drawing each held-out set; beyond that, `prepare` checks whether there are enough problems


def empty_and_right(config: Config) -> tuple[Trial, Trial]:
    """Score an empty response and the reference answer of the first problem with the run's reward."""
    (problem,), template = make_problems(config, fit_all).draw("train", 0, 1), config.data.template
    empty, right = (try_reward(config, text, 0) for text in ("", close_thoughts(template, problem.demonstration)))
    if right.score == empty.score:  # the reward may want the answer alone
        right = try_reward(config, close_thoughts(template, problem.answer), 0)
    return empty, right


def check_data(config: Config) -> None:
    """Check what `[data]` names: generators, files, columns, template, rewards, and the number of problems.

    This imports the user's reward function or environment, and torch only if that does.
    """
    check_template(config.data.template)
    check_scoring(config)
    problems, count = make_problems(config, fit_all), config.validate_.num_prompts
    problems.draw("train", 0, 1)
    with prefixed(f"validate.num_prompts = {count}: "):
        problems.held_out(count, PATIENCE_S)
    if config.drafter.data is not None:
        for place in config.drafter.data:
            read_requests(place)
    for name in config.validate_.sets:
        with prefixed(f"validate.sets.{name}: "):
            check_scoring(config_of_set(config, name))
        held_out_problems(config, name, fit_all, PATIENCE_S)


def check_sandbox(config: Config) -> None:
    """Check that the kernel has a whole sandbox if a reward, also of a held-out set, or the environment runs code."""
    held = sandbox.available()
    for data in (config.data, *(config_of_set(config, name).data for name in config.validate_.sets)):
        refuse_open_sandbox(held, runs_code(data, config.environment.name))
