"""The environment that a policy talks with, turn by turn."""

from __future__ import annotations

from specrl.config.base import Adjustable, PositiveInt, Section


class EnvironmentConfig(Section):
    """An environment that answers and rewards each turn of the policy, in place of `data.reward`."""

    name: str | None = None
    """The environment: `calculator`, or an import path `package.module:Class` of your own; without one, a response is
    one turn. It runs where rewards do, under the same limits, and each turn may take `data.reward_timeout_s`."""
    max_turns: Adjustable[PositiveInt] = 4
    """The largest number of turns of the policy in a conversation."""
