"""Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2): how far a response is above its siblings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from statistics import fmean, pstdev

EPSILON = 1e-6


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], *, normalize_by_std: bool = True
) -> list[float]:
    """Reward minus the mean of its group, over the group's standard deviation.

    Args:
        rewards: one per response.
        groups: the group of each response, such as its prompt.
        normalize_by_std: without it the difference stays as it is (Dr. GRPO, arXiv 2503.20783).

    Returns:
        One advantage per response, in order; exactly 0 throughout a group whose rewards are all equal.
    """
    assert len(rewards) == len(groups), (len(rewards), len(groups))
    members: dict[Hashable, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    mean = {group: fmean(values) for group, values in members.items()}
    scale = {group: pstdev(values) + EPSILON if normalize_by_std else 1.0 for group, values in members.items()}
    return [
        0.0 if _flat(members[group]) else (reward - mean[group]) / scale[group]
        for reward, group in zip(rewards, groups, strict=True)
    ]


def zero_signal_fraction(rewards: Sequence[float], groups: Sequence[Hashable]) -> float:
    """Share of groups whose rewards are all equal: they teach nothing."""
    members: dict[Hashable, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    return sum(_flat(values) for values in members.values()) / max(1, len(members))


def _flat(values: list[float]) -> bool:
    return min(values) == max(values)
