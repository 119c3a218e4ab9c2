"""Dividing work into shares of nearly equal size."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal_longest_first(lengths: Sequence[float], num_shares: int) -> list[list[int]]:
    """Assign items, longest first, each to the share with the smallest sum of lengths so far.

    Ties are broken by index, so that every rank computes the same shares.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    queue = [(0.0, share) for share in range(num_shares)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, share = heapq.heappop(queue)
        shares[share].append(index)
        heapq.heappush(queue, (load + lengths[index], share))
    return shares


def piece(left: int, num_engines: int) -> int:
    """How many of the `left` responses an idle engine claims at once, as all engines but one may be idle."""
    return -(-left // max(1, num_engines - 1))


def deal_near_home(lengths: Sequence[float], homes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Divide items into shares of nearly equal size while moving few of them to another share.

    Items, longest first, stay where they are as long as their share does not exceed the longest share of
    `deal_longest_first`. The others go to the share with the smallest sum of lengths. The longest share therefore
    exceeds that of `deal_longest_first` by at most one item. Every rank computes the same indices.
    """
    even = deal_longest_first(lengths, num_shares)
    most = max(sum(lengths[index] for index in share) for share in even)
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0.0] * num_shares
    moved = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        home = homes[index]
        if loads[home] + lengths[index] > most:
            moved.append(index)
            continue
        shares[home].append(index)
        loads[home] += lengths[index]
    for index in moved:
        share = min(range(num_shares), key=loads.__getitem__)
        shares[share].append(index)
        loads[share] += lengths[index]
    return shares
