"""Work dealt out in shares of nearly equal size."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal_longest_first(lengths: Sequence[float], num_shares: int, room: int | None = None) -> list[list[int]]:
    """Deal items, the longest first, each to the share with the smallest sum of lengths so far that has room.

    Equal items are dealt in their order, and among equal shares the first one gets the item, so that every rank comes
    to the same result.

    Args:
        lengths: The length of each item.
        num_shares: The number of shares.
        room: The largest number of items in a share; all shares together must have room for all items. There is no
            limit by default.

    Returns:
        For each share the indices of its items, in the order they were dealt.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    queue = [(0.0, share) for share in range(num_shares)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, share = heapq.heappop(queue)
        shares[share].append(index)
        if room is None or len(shares[share]) < room:
            heapq.heappush(queue, (load + lengths[index], share))
    return shares
