"""Recent responses to any prompt as drafts: a response may go on as an earlier one of this engine did.

Responses to one task resemble each other: in their format, their phrases and the results of the same small steps.
Looking them up needs no drafter and no warm-up and, as with every draft, decides nothing but the time. SuffixDecoding
(arXiv:2411.04975) keeps a tree of earlier outputs for this; here the latest ones are kept and found by a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.replay import END, PAIR, longest_agreement

LOOKED_UP = (2 * PAIR, PAIR)
"""How many last tokens are looked up, in order; the first number that finds text is taken."""


class RecentText:
    """The latest responses as one sequence, `END` around each, and where their short sequences of tokens occur."""

    def __init__(self, most_tokens: int, settings: ControlSettings | None = None) -> None:
        """Begin without responses.

        Args:
            most_tokens: The number of tokens of all responses together above which `trim` drops the oldest.
        """
        self.settings = settings or ControlSettings()
        self.tokens: list[int] = [END]
        self.starts: list[int] = []
        """Always empty, like `start_of`: a response is not expected to begin as another one did."""
        self.start_of: dict[int, int] = {}
        self._most = most_tokens
        self._places: dict[int, list[int]] = {}
        """Positions by the hash of the tokens before them. The tokens are compared later, so collisions do no harm."""

    def add(self, response: Sequence[int]) -> None:
        """Add a finished response; cursors on this text stay where they are."""
        first, most = len(self.tokens), self.settings.most_places
        self.tokens += [*response, END]
        for position in range(first + PAIR, len(self.tokens)):
            for size in LOOKED_UP:
                if position - size < first:
                    continue
                places = self._places.setdefault(hash(tuple(self.tokens[position - size : position])), [])
                places.append(position)
                if len(places) > 2 * most:
                    del places[:most]

    def trim(self) -> None:
        """Drop the oldest responses, down to half of `most_tokens`, if there are too many; no cursor may be in use."""
        if len(self.tokens) <= self._most:
            return
        first = self.tokens.index(END, len(self.tokens) - 1 - self._most // 2)
        kept, self.tokens, self._places = self.tokens, [END], {}
        ends = [position for position in range(first, len(kept)) if kept[position] == END]
        for start, end in pairwise(ends):
            self.add(kept[start + 1 : end])

    def after_longest_suffix(self, output: Sequence[int]) -> tuple[list[int], int]:
        """Return the positions after the longest agreement found, the latest first; see `DraftText`."""
        for size in LOOKED_UP:
            places = self._places.get(hash(tuple(output[-size:])), []) if len(output) >= size else []
            latest = places[: -self.settings.most_places - 1 : -1]
            positions, agreed = longest_agreement(self.tokens, latest, output, self.settings)
            if agreed:
                return positions, agreed
        return [], 0
