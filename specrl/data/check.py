"""The checks of data and reward that are made before a job is submitted."""

from __future__ import annotations

from specrl.config import Config, ConfigError
from specrl.data.files import read_requests
from specrl.data.held_out import config_of_set, held_out_problems, make_problems
from specrl.data.problems import fit_all
from specrl.data.rendering import check_template
from specrl.data.rewards.functions import make_reward
from specrl.data.rewards.trial import Trial, try_reward

PATIENCE_S = 5.0
"""The time, in seconds, for which held-out problems of each set are drawn to see whether there are enough. Generators
that run out of problems do so quickly; where drawing takes longer, `prepare` sees it."""


def empty_and_right(config: Config) -> tuple[Trial, Trial]:
    """Score an empty response and the reference answer of the first problem, by the reward that a run would have."""
    (problem,) = make_problems(config, fit_all).draw("train", 0, 1)
    return try_reward(config, "", 0), try_reward(config, problem.demonstration, 0)


def check_data(config: Config) -> None:
    """Check that generators take their parameters, files have their columns, and template and reward are valid.

    There must also be a problem to train on, and as many held-out ones as are asked for (if all prompts are short), as
    far as `PATIENCE_S` lets them be counted. This imports the user's reward function, and torch only if that does.

    Raises:
        ConfigError: One of these is wrong; the message is one line about the first.
    """
    check_template(config.data.template)
    make_reward(config.data)
    problems, count = make_problems(config, fit_all), config.validate_.num_prompts
    problems.draw("train", 0, 1)
    try:
        problems.held_out(count, PATIENCE_S)
    except ConfigError as error:
        raise ConfigError(f"validate.num_prompts = {count}: {error}") from error
    if config.drafter.data is not None:
        for place in config.drafter.data:
            read_requests(place)
    for name in config.validate_.sets:
        make_reward(config_of_set(config, name).data)
        held_out_problems(config, name, fit_all, PATIENCE_S)
