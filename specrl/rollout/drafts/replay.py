"""Stored text as drafts: responses to the same prompt are followed while they agree, and looked up again after that.

This is matching of tokens and needs no engine. A response in progress keeps a `ReplayCursor`, which takes one step per
new token, so that an iteration costs microseconds however long the response is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from specrl.rollout.control import ControlSettings

OWN_SEED = 64
"""The agreement that a response is said to have with the stored text of its own seed, in tokens."""
PAIR = 2
"""The number of last tokens that must agree at least; text is looked up by them."""
END = -1
"""The marker before, between and after stored responses; no token has this id."""


class DraftText(Protocol):
    """Text in which cursors move; meanwhile it may grow at its end."""

    @property
    def settings(self) -> ControlSettings:
        """The constants of the search."""
        ...

    @property
    def tokens(self) -> list[int]:
        """The tokens of all responses, with `END` before, between and after these."""
        ...

    @property
    def starts(self) -> list[int]:
        """The positions at which a new response may begin: those where the stored ones do."""
        ...

    @property
    def start_of(self) -> Mapping[int, int]:
        """The position at which the response of a seed begins, for every known seed."""
        ...

    def after_longest_suffix(self, output: Sequence[int]) -> tuple[list[int], int]:
        """Return the positions after the longest occurrences of `output`'s last tokens, and how many tokens agree.

        Agreements of `longest_suffix` tokens or more count as equal. If fewer than two agree, the result is ([], 0).
        """
        ...


class StoredResponses:
    """Responses to one prompt as one sequence, `END` around each, and where each pair of tokens occurs in it."""

    def __init__(
        self, responses: Iterable[Sequence[int]], seeds: Sequence[int] = (), settings: ControlSettings | None = None
    ) -> None:
        """Put the responses together.

        Args:
            responses: The tokens of each response.
            seeds: The seeds that the responses were sampled with, in the same order; empty if they are not known.
        """
        self.settings = settings or ControlSettings()
        self.tokens: list[int] = [END]
        self.starts: list[int] = []
        for response in responses:
            self.starts.append(len(self.tokens))
            self.tokens += [*response, END]
        self.start_of: dict[int, int] = dict(zip(seeds, self.starts, strict=True)) if seeds else {}
        self._pairs: dict[tuple[int, int], list[int]] | None = None

    def after_longest_suffix(self, output: Sequence[int]) -> tuple[list[int], int]:
        places = self._after_pair(output[-2], output[-1]) if len(output) >= 2 else []
        positions, longest = longest_agreement(self.tokens, places, output, self.settings)
        return positions[: self.settings.most_places], longest

    def _after_pair(self, first: int, second: int) -> list[int]:
        if self._pairs is None:  # most responses follow one text to its end and need no lookup
            self._pairs = {}
            for position in range(2, len(self.tokens)):
                places = self._pairs.setdefault((self.tokens[position - 2], self.tokens[position - 1]), [])
                if len(places) < self.settings.most_places:
                    places.append(position)
        return self._pairs.get((first, second), [])


def longest_agreement(
    text: Sequence[int], places: Iterable[int], output: Sequence[int], settings: ControlSettings
) -> tuple[list[int], int]:
    """Return the places in `text` before which the most of `output`'s last tokens stand, and how many these are.

    The result is as in `DraftText.after_longest_suffix`.
    """
    found: dict[int, list[int]] = {}
    for position in places:
        found.setdefault(_agreement(text, position, output[-settings.longest_suffix :]), []).append(position)
    longest = max(found, default=0)
    return (found[longest], longest) if longest >= PAIR else ([], 0)


def _agreement(text: Sequence[int], position: int, output: Sequence[int]) -> int:
    length = 0
    while length < len(output) and text[position - length - 1] == output[-length - 1]:
        length += 1
    return length


class ReplayCursor:
    """The place of one response in progress in stored responses to its prompt, or in recent ones to any prompt."""

    def __init__(self, stored: DraftText, seed: int | None = None) -> None:
        """Begin where new responses to the prompt are expected to begin.

        Args:
            stored: The text to follow.
            seed: The seed of the response in progress. Text of the same seed is most likely what the response will be,
                whatever other text says. It is followed until it turns out to be wrong, and other text only after that.
        """
        self._longest = stored.settings.longest_suffix
        self._stored = stored
        self._own = stored.start_of.get(seed) if seed is not None else None
        """The position in the text of the response's own seed, as long as that agrees; else None."""
        self._positions = list(stored.starts)
        self._last: list[int] = []
        self.matched = self._longest
        """The number of tokens by which the followed texts agree with the response; `longest_suffix` at first."""

    @property
    def agreement(self) -> int:
        """`OWN_SEED` if text of the own seed is drafted next, else the tokens by which other text agrees, or 0."""
        return OWN_SEED if self._follows_own else self.matched

    @property
    def _follows_own(self) -> bool:
        return self._own is not None and self._stored.tokens[self._own] != END

    def advance(self, tokens: Iterable[int]) -> None:
        """Follow the tokens that the response has got since the last call."""
        text = self._stored.tokens
        for token in tokens:
            self._last = [*self._last, token][-self._longest :]
            if self._own is not None:
                self._own = self._own + 1 if text[self._own] == token else None
            self._positions = [position + 1 for position in self._positions if text[position] == token]
            if self._positions:
                self.matched = min(self.matched + 1, self._longest)
            else:
                self._positions, self.matched = self._stored.after_longest_suffix(self._last)

    def draft(self, k: int) -> list[int]:
        """Return up to `k` tokens that continue the followed texts: each is that of most of them, or of the first."""
        text, positions = self._stored.tokens, self._positions
        if self._own is not None and self._follows_own:
            ahead = text[self._own : self._own + k]
            return ahead[: ahead.index(END)] if END in ahead else ahead
        tokens: list[int] = []
        while positions and len(tokens) < k:
            votes = Counter(text[position] for position in positions if text[position] != END)
            if not votes:
                break
            token = votes.most_common(1)[0][0]  # of equal counts the one met first: the earliest stored
            tokens.append(token)
            positions = [position + 1 for position in positions if text[position] == token]
        return tokens


class ReplayIndex:
    """Stored responses by the tokens of their prompt."""

    def __init__(self, stored: Mapping[tuple[int, ...], StoredResponses]) -> None:
        self._stored = stored

    @classmethod
    def of(
        cls,
        texts: Mapping[tuple[int, ...], Sequence[Sequence[int]]],
        seeds: Mapping[tuple[int, ...], Sequence[int]] | None = None,
        settings: ControlSettings | None = None,
    ) -> ReplayIndex:
        """Index stored responses by the tokens of their prompt; where continuations tie, the first response counts.

        Args:
            texts: The tokens of the responses to each prompt.
            seeds: The seeds that they were sampled with, in the same order, for prompts where they are known.
        """
        known = seeds or {}
        return cls(
            {prompt: StoredResponses(rows, known.get(prompt, ()), settings) for prompt, rows in texts.items() if rows}
        )

    def cursor(self, prompt_tokens: Sequence[int], seed: int | None = None) -> ReplayCursor | None:
        """Return a cursor for a new response to the prompt, or None where nothing is stored for it."""
        stored = self._stored.get(tuple(prompt_tokens))
        return ReplayCursor(stored, seed) if stored is not None else None

    def stored(self, prompt_tokens: Sequence[int], seed: int) -> tuple[int, int]:
        """Return how many responses are stored for the prompt, and how many tokens the one of this seed has."""
        found = self._stored.get(tuple(prompt_tokens))
        if found is None:
            return 0, 0
        start = found.start_of.get(seed)
        return len(found.starts), 0 if start is None else found.tokens.index(END, start) - start

    def propose(
        self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], k: int, seed: int | None = None
    ) -> list[int]:
        """Return up to `k` tokens that may follow the response so far; a cursor does the same step by step."""
        cursor = self.cursor(prompt_tokens, seed)
        if cursor is None:
            return []
        cursor.advance(output_tokens)
        return cursor.draft(k)
