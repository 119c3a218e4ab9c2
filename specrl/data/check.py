"""Everything about data and reward that can be said before a job is submitted."""

from __future__ import annotations

from specrl.config import Config
from specrl.data.prompts import check_template, make_problems
from specrl.data.rewards import make_reward


def check_data(config: Config) -> None:
    """Generators exist and take their parameters, files have their columns, the template and the reward fit.

    Imports the user's reward function, and no torch of its own accord.

    Raises:
        ConfigError: one line on the first thing that does not fit.
    """
    check_template(config.data.template)
    make_reward(config.data)
    make_problems(config.data, config.seed)
