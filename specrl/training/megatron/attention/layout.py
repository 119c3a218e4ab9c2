"""Where the segments of a flat row lie, as attention needs it.

Megatron hands `MicroBatch.segments` to every layer in the place of an attention mask, also where activations are
computed again in the backward pass, when another micro-batch may have passed in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """Tokens that attend to each other causally, and to all tokens of a prefix; see `MicroBatch.segments`."""

    start: int
    stop: int
    prefix_start: int
    prefix_stop: int

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.stop - self.start

    @property
    def num_keys(self) -> int:
        """The number of tokens that the last token attends to."""
        return self.length + self.prefix_stop - self.prefix_start


@dataclass(frozen=True)
class RowLayout:
    """The segments of a flat row, and what follows from them."""

    segments: tuple[Segment, ...]
    device: torch.device

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token in its sequence, [tokens] int64: a segment continues behind its prefix."""
        parts = [torch.arange(each.num_keys - each.length, each.num_keys) for each in self.segments]
        return torch.cat(parts).to(self.device)

    @property
    def longest(self) -> int:
        """The largest number of tokens that one attends to."""
        return max(each.num_keys for each in self.segments)

    @cached_property
    def keys(self) -> Tensor | None:
        """The place of every key, segment by segment, [keys] int64; None if they are the row as it is."""
        if all(each.num_keys == each.length for each in self.segments):
            return None
        ranges = [
            torch.arange(*part)
            for each in self.segments
            for part in ((each.prefix_start, each.prefix_stop), (each.start, each.stop))
        ]
        return torch.cat(ranges).to(self.device)

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The cumulative numbers of queries and of keys, [segments + 1] int32 each, as variable-length kernels want."""
        queries = accumulate((each.length for each in self.segments), initial=0)
        keys = accumulate((each.num_keys for each in self.segments), initial=0)
        first, second = (torch.tensor(list(each), dtype=torch.int32) for each in (queries, keys))
        return first.to(self.device), second.to(self.device)

    @property
    def most_queries(self) -> int:
        """The length of the longest segment."""
        return max(each.length for each in self.segments)


def row_layout(segments: Tensor, device: torch.device) -> RowLayout:
    """The layout of a row, the same object for the same segments, so that its tensors are made once."""
    return _row_layout(tuple(Segment(*row) for row in segments.tolist()), device)


@lru_cache(maxsize=32)
def _row_layout(segments: tuple[Segment, ...], device: torch.device) -> RowLayout:
    return RowLayout(segments, device)
