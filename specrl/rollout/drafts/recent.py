"""Recent responses, to whatever prompts, as drafts: where a response goes on as one did that this engine has finished.

Responses of one task resemble each other: their format, phrases, results of the same small steps. Looking them up needs
no drafter and no warm-up, and like every draft decides nothing but the time. After SuffixDecoding (arXiv:2411.04975),
which keeps a tree of earlier outputs; here the last ones, found by their last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from specrl.rollout.drafts.replay import END, SHORTEST_SUFFIX, longest_agreement

LOOKED_UP = (4, SHORTEST_SUFFIX)
"""Numbers of last tokens that are looked up: the first that occur."""
MOST_PLACES = 64
"""Latest places that are kept of each, at least; up to twice as many."""
KEPT = 0.5
"""Of the most tokens, once there are more: so that the index is made anew only now and then."""


class RecentText:
    """The latest responses as one sequence, `END` around each, and where their short sequences of tokens occur."""

    def __init__(self, most_tokens: int) -> None:
        """
        Args:
            most_tokens: of all responses together; the oldest are dropped.
        """
        self.tokens: list[int] = [END]
        self.starts: list[int] = []
        self.start_of: dict[int, int] = {}
        """None: a response is not expected to begin as another one did."""
        self._most = most_tokens
        self._places: dict[int, list[int]] = {}
        """By the hash of the tokens before: whether they agree is looked at anyway."""

    def add(self, response: Sequence[int]) -> None:
        """A finished response; cursors on this text stay where they are."""
        first = len(self.tokens)
        self.tokens += [*response, END]
        for position in range(first + SHORTEST_SUFFIX, len(self.tokens)):
            for size in LOOKED_UP:
                if position - size < first:
                    continue
                places = self._places.setdefault(hash(tuple(self.tokens[position - size : position])), [])
                places.append(position)
                if len(places) > 2 * MOST_PLACES:
                    del places[:MOST_PLACES]

    def trim(self) -> None:
        """Drop the oldest responses if there are too many tokens; no cursor may be in use."""
        if len(self.tokens) <= self._most:
            return
        first = self.tokens.index(END, len(self.tokens) - 1 - int(KEPT * self._most))
        kept, self.tokens, self._places = self.tokens, [END], {}
        ends = [position for position in range(first, len(kept)) if kept[position] == END]
        for start, end in pairwise(ends):
            self.add(kept[start + 1 : end])

    def after_longest_suffix(self, output: Sequence[int]) -> tuple[list[int], int]:
        """As of `StoredResponses`, the latest first."""
        for size in LOOKED_UP:
            places = self._places.get(hash(tuple(output[-size:])), []) if len(output) >= size else []
            positions, agreed = longest_agreement(self.tokens, places[: -MOST_PLACES - 1 : -1], output)
            if agreed:
                return positions, agreed
        return [], 0
