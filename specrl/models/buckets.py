"""How the tensors of a layer are grouped into messages when weights travel between ranks. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

BUCKET_BYTES = 2**28  # larger messages are no faster


def buckets(sizes: Sequence[int]) -> list[range]:
    """The indices of the tensors in each message, in order, given the bytes of each tensor of a layer.

    A message holds about a quarter of the layer, so that a layer takes few messages and no more than its own memory
    while it travels.
    """
    if not sizes:
        return []
    limit = max(*sizes, min(sum(sizes) // 4, BUCKET_BYTES))
    found: list[range] = []
    first, size = 0, 0
    for index, nbytes in enumerate(sizes):
        if index > first and size + nbytes > limit:
            found.append(range(first, index))
            first, size = index, 0
        size += nbytes
    return [*found, range(first, len(sizes))]
