"""The checks of data and reward that are made before a job is submitted."""

from __future__ import annotations

from specrl.config import Config, ConfigError
from specrl.data.files import read_requests
from specrl.data.held_out import config_of_set, held_out_problems, make_problems
from specrl.data.problems import fit_all
from specrl.data.rendering import check_template
from specrl.data.rewards import make_reward


def check_data(config: Config, *, draw_all: bool = True) -> None:
    """Check that generators take their parameters, files have their columns, and template and reward are valid.

    There must also be a problem to train on, and as many held-out ones as are asked for (if all prompts are short).

    This imports the user's reward function; it does not import torch unless that function does.

    Args:
        draw_all: Whether generators draw as many held-out problems as are asked for, which takes minutes with slow
            ones; if not, each set gets one. Files are read whole in either case.

    Raises:
        ConfigError: One of these is wrong; the message is one line about the first.
    """
    config = config if draw_all else _with_one_draw(config)
    check_template(config.data.template)
    make_reward(config.data)
    problems, count = make_problems(config.data, config.seed, fit_all), config.validate_.num_prompts
    problems.draw("train", 0, 1, 0)
    try:
        problems.held_out(count)
    except ConfigError as error:
        raise ConfigError(f"validate.num_prompts = {count}: {error}") from error
    if config.drafter.data is not None:
        read_requests(config.drafter.data)
    for name in config.validate_.sets:
        make_reward(config_of_set(config, name).data)
        held_out_problems(config, name, fit_all)


def _with_one_draw(config: Config) -> Config:
    """Return the configuration with one held-out problem in each set that generators draw."""
    validate, one = config.validate_, {"num_prompts": 1}
    from_generators = config.data.source == "generators"
    sets = {
        name: chosen.model_copy(update=one) if chosen.generators or (from_generators and not chosen.path) else chosen
        for name, chosen in validate.sets.items()
    }
    changed = {"sets": sets, **(one if from_generators else {})}
    return config.model_copy(update={"validate_": validate.model_copy(update=changed)})
