"""Advantage estimators: how much better a response is than its group, the responses to the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from statistics import fmean, pstdev

from specrl.config.algorithms import ADVANTAGES, Algorithm, Options

Rewards = Sequence[Sequence[float]]
"""The rewards of the responses of each group."""
AdvantageFunction = Callable[..., list[list[float]]]
"""(rewards by group, options) -> advantages by group, one for each reward.

If it takes parts, it gets (parts by group, weights, options), where a group has the rewards of each part, without the
penalty of `train.overlong_window`.

A group whose rewards are all equal must get zeros: it says nothing about its responses, and
`train.drop_zero_signal_groups` leaves out groups whose advantages are all zero.
"""

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

register_advantage: Callable[..., Callable[[AdvantageFunction], AdvantageFunction]] = ADVANTAGES.register
"""Decorator that registers an advantage estimator for `train.advantage` under a name, with a model of its options and,
if it takes parts, `of_parts`."""


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    advantage: Algorithm,
    parts: Sequence[Sequence[float]] = (),
    weights: Sequence[float] = (),
) -> list[float]:
    """The advantage of each response.

    Args:
        rewards: The reward of each response.
        groups: The group of each response, such as its prompt's id.
        advantage: `train.advantage`.
        parts: The values of each part of the rewards, if they have parts: one for each response.
        weights: The weight of each part.
    """
    members, function = _members(rewards, groups), ADVANTAGES.function(advantage)
    if ADVANTAGES.find(advantage.name).of_parts:
        columns = [_members(part, groups) for part in parts or [rewards]]
        found = function([[column[group] for column in columns] for group in members], weights if parts else [1.0])
    else:
        found = function(list(members.values()))
    advantages = {group: iter(values) for group, values in zip(members, found, strict=True)}
    return [next(advantages[group]) for group in groups]


def zero_signal_fraction(rewards: Sequence[float], groups: Sequence[Hashable]) -> float:
    """The share of groups whose rewards are all equal, which carry no signal; 0 without any group."""
    return 1 - len(groups_with_signal(rewards, groups)) / len(set(groups)) if groups else 0.0


def groups_with_signal[Key: Hashable](rewards: Sequence[float], groups: Sequence[Key]) -> list[Key]:
    """The groups whose rewards differ, in order, as kept by dynamic sampling (DAPO, arXiv 2503.14476, eq. 11)."""
    return [group for group, values in _members(rewards, groups).items() if not _is_flat(values)]


class GrpoAdvantageOptions(Options):
    """The options of the `grpo` advantages."""

    normalize_by_std: bool = True
    """Whether to divide by the standard deviation of the group's rewards; false is Dr. GRPO's advantage (arXiv
    2503.20783)."""


@register_advantage("grpo", GrpoAdvantageOptions)
def grpo_advantages(groups: Rewards, options: GrpoAdvantageOptions) -> list[list[float]]:
    """Subtract the group's mean reward, and divide by its standard deviation (arXiv 2402.03300, section 4.1.2)."""

    def of_group(rewards: Sequence[float]) -> list[float]:
        mean = fmean(rewards)
        scale = pstdev(rewards) + STD_EPSILON if options.normalize_by_std else 1.0
        return [(reward - mean) / scale for reward in rewards]

    return [[0.0] * len(rewards) if _is_flat(rewards) else of_group(rewards) for rewards in groups]


@register_advantage("rloo")
def rloo_advantages(groups: Rewards, _: Options) -> list[list[float]]:
    """Subtract the mean reward of the group's other responses (REINFORCE leave-one-out, arXiv 2402.14740)."""

    def of_group(rewards: Sequence[float]) -> list[float]:
        total, others = sum(rewards), len(rewards) - 1
        return [reward - (total - reward) / others for reward in rewards]

    return [[0.0] * len(rewards) if _is_flat(rewards) else of_group(rewards) for rewards in groups]


@register_advantage("reinforce++")
def reinforce_advantages(groups: Rewards, _: Options) -> list[list[float]]:
    """Subtract the group's mean reward, and divide by the standard deviation of the whole step (arXiv 2501.03262)."""
    centred = [[reward - fmean(rewards) for reward in rewards] for rewards in groups]
    scale = pstdev([value for values in centred for value in values]) + STD_EPSILON
    return [
        [0.0] * len(rewards) if _is_flat(rewards) else [value / scale for value in values]
        for rewards, values in zip(groups, centred, strict=True)
    ]


@register_advantage("none")
def no_advantages(groups: Rewards, _: Options) -> list[list[float]]:
    """Learn nothing from rewards, only from `train.teacher`."""
    return [[0.0] * len(rewards) for rewards in groups]


@register_advantage("gdpo", of_parts=True)
def gdpo_advantages(groups: Sequence[Rewards], weights: Sequence[float], _: Options) -> list[list[float]]:
    """Normalise each part in its group, sum the weighted parts, and normalise over the step (GDPO, arXiv 2601.05242).

    The mean of the sums is 0 already, in each group.
    """

    def normalised(values: Sequence[float]) -> list[float]:
        mean, scale = fmean(values), pstdev(values) + STD_EPSILON
        return [0.0] * len(values) if _is_flat(values) else [(value - mean) / scale for value in values]

    sums = []
    for parts in groups:
        columns = zip(*map(normalised, parts), strict=True)
        sums.append([sum(weight * value for weight, value in zip(weights, row, strict=True)) for row in columns])
    scale = pstdev([value for values in sums for value in values]) + STD_EPSILON
    return [[value / scale for value in values] for values in sums]


def _members[Key: Hashable](rewards: Sequence[float], groups: Sequence[Key]) -> dict[Key, list[float]]:
    assert len(rewards) == len(groups), (len(rewards), len(groups))
    members: dict[Key, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    return members


def _is_flat(values: Sequence[float]) -> bool:
    return min(values) == max(values)
