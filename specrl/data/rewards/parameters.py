"""The base of the parameters that a registered reward takes."""

from __future__ import annotations

from specrl.config import ConfigError, DataConfig
from specrl.config.algorithms import Options


class RewardParameters(Options):
    """What `parameters` of a part of `data.reward` may hold. A subclass declares each as a field with a docstring."""

    def check(self, config: DataConfig) -> None:
        """Raise ConfigError where the reward cannot work beside the other settings of `[data]`."""


def check_seconds(name: str, needed: float, config: DataConfig) -> None:
    """Raise ConfigError where a reward may take as long as a response may, so that its process would be ended."""
    if needed >= config.reward_timeout_s:
        raise ConfigError(
            f"data.reward.{name} may take {needed:g} s: data.reward_timeout_s = {config.reward_timeout_s:g} must be "
            "longer than that"
        )
