"""Stored text as drafts: responses to the same prompt are followed as long as they agree, and found again after.

Pure matching, no engine. A response in progress keeps a `ReplayCursor`: one step per new token, so that an iteration
costs microseconds however long the response is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

LONGEST_SUFFIX, SHORTEST_SUFFIX = 8, 2
"""Last tokens of a response that are looked up in stored text after it has left what it followed."""
OWN_SEED = LONGEST_SUFFIX + 1
"""Agreement of a response with the stored text of its own seed: better than any other."""
MOST_FOLLOWED, MOST_PLACES = 64, 256
"""Positions followed at once, and places of a pair that are looked at: text that repeats itself has thousands, and each
would be compared in every iteration."""
END = -1
"""Stands before, between and after stored responses; no token."""


class DraftText(Protocol):
    """What a cursor moves in; it may grow at its end meanwhile."""

    @property
    def tokens(self) -> list[int]:
        """Responses, `END` before, between and after them."""
        ...

    @property
    def starts(self) -> list[int]:
        """Where a new response is expected to begin."""
        ...

    @property
    def start_of(self) -> Mapping[int, int]:
        """The same for the responses of one seed, by seed."""
        ...

    def after_longest_suffix(self, output: Sequence[int]) -> tuple[list[int], int]:
        """Positions that follow an occurrence of `output`'s last tokens, and how many agree; ([], 0) where too few do.

        The longest agreement counts, `LONGEST_SUFFIX` at most: beyond that all are as good.
        """
        ...


class StoredResponses:
    """Responses to one prompt as one sequence, `END` around each, and where each pair of tokens occurs in it."""

    def __init__(self, responses: Iterable[Sequence[int]], seeds: Sequence[int] = ()) -> None:
        """
        Args:
            seeds: that the responses were sampled with, where they are known: one for each.
        """
        self.tokens: list[int] = [END]
        self.starts: list[int] = []
        for response in responses:
            self.starts.append(len(self.tokens))
            self.tokens += [*response, END]
        self.start_of: dict[int, int] = dict(zip(seeds, self.starts, strict=True)) if seeds else {}
        """By seed."""
        self._pairs: dict[tuple[int, int], list[int]] | None = None

    def after_longest_suffix(self, output: Sequence[int]) -> tuple[list[int], int]:
        places = self._after_pair(output[-2], output[-1]) if len(output) >= SHORTEST_SUFFIX else []
        positions, longest = longest_agreement(self.tokens, places, output)
        return positions[:MOST_FOLLOWED], longest

    def _after_pair(self, first: int, second: int) -> list[int]:
        if self._pairs is None:  # most responses follow one text to its end, and never ask
            self._pairs = {}
            for position in range(2, len(self.tokens)):
                places = self._pairs.setdefault((self.tokens[position - 2], self.tokens[position - 1]), [])
                if len(places) < MOST_PLACES:
                    places.append(position)
        return self._pairs.get((first, second), [])


def longest_agreement(text: Sequence[int], places: Iterable[int], output: Sequence[int]) -> tuple[list[int], int]:
    """Those of the places whose tokens before agree with most of `output`'s last, and with how many; ([], 0) where
    fewer than `SHORTEST_SUFFIX` do. `LONGEST_SUFFIX` at most: beyond that all are as good."""
    found: dict[int, list[int]] = {}
    for position in places:
        found.setdefault(_agreement(text, position, output), []).append(position)
    longest = max(found, default=0)
    return (found[longest], longest) if longest >= SHORTEST_SUFFIX else ([], 0)


def _agreement(text: Sequence[int], position: int, output: Sequence[int]) -> int:
    length = 0
    limit = min(LONGEST_SUFFIX, len(output))
    while length < limit and text[position - length - 1] == output[-length - 1]:
        length += 1
    return length


class ReplayCursor:
    """Where one response in progress is in text: stored responses to its prompt, or recent ones to any."""

    def __init__(self, stored: DraftText, seed: int | None = None) -> None:
        """
        Args:
            seed: of the response in progress. A text of the same seed is what it will most likely be, whatever the
                others say: it is followed to its end, and the others only once it has turned out to be wrong.
        """
        self._stored = stored
        self._own = stored.start_of.get(seed) if seed is not None else None
        """Where it is in the text of its own seed, while that agrees."""
        self._positions = list(stored.starts)
        self._last: list[int] = []
        self.matched = LONGEST_SUFFIX
        """Tokens by which the followed texts agree with the response so far; a whole prefix counts as the longest."""

    @property
    def agreement(self) -> int:
        """Of what is drafted next: `OWN_SEED`, or the tokens by which other texts agree."""
        return OWN_SEED if self._follows_own else self.matched

    @property
    def _follows_own(self) -> bool:
        return self._own is not None and self._stored.tokens[self._own] != END

    def advance(self, tokens: Iterable[int]) -> None:
        """Take the tokens that the response has got."""
        text = self._stored.tokens
        for token in tokens:
            self._last = [*self._last[1 - LONGEST_SUFFIX :], token]
            if self._own is not None:
                self._own = self._own + 1 if text[self._own] == token else None
            self._positions = [position + 1 for position in self._positions if text[position] == token]
            if self._positions:
                self.matched = min(self.matched + 1, LONGEST_SUFFIX)
            else:
                self._positions, self.matched = self._stored.after_longest_suffix(self._last)

    def draft(self, k: int) -> list[int]:
        """Up to k tokens that continue the followed texts: at each place what most of them say, the first at a tie."""
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
    """Stored responses by prompt."""

    def __init__(self, stored: Mapping[tuple[int, ...], StoredResponses]) -> None:
        self._stored = stored

    @classmethod
    def of(
        cls,
        texts: Mapping[tuple[int, ...], Sequence[Sequence[int]]],
        seeds: Mapping[tuple[int, ...], Sequence[int]] | None = None,
    ) -> ReplayIndex:
        """Index stored responses by their prompt's tokens; where as many say one thing as another, the first counts.

        Args:
            seeds: that they were sampled with, in the same order.
        """
        known = seeds or {}
        return cls({prompt: StoredResponses(rows, known.get(prompt, ())) for prompt, rows in texts.items() if rows})

    def cursor(self, prompt_tokens: Sequence[int], seed: int | None = None) -> ReplayCursor | None:
        """A cursor for a new response to the prompt; none where nothing is stored for it."""
        stored = self._stored.get(tuple(prompt_tokens))
        return ReplayCursor(stored, seed) if stored is not None else None

    def stored(self, prompt_tokens: Sequence[int], seed: int) -> tuple[int, int]:
        """How many responses are stored for the prompt, and how many tokens of the one of this seed."""
        found = self._stored.get(tuple(prompt_tokens))
        if found is None:
            return 0, 0
        start = found.start_of.get(seed)
        return len(found.starts), 0 if start is None else found.tokens.index(END, start) - start

    def propose(
        self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], k: int, seed: int | None = None
    ) -> list[int]:
        """Up to k tokens that may follow the response so far; [] where nothing matches. A cursor does this in steps."""
        cursor = self.cursor(prompt_tokens, seed)
        if cursor is None:
            return []
        cursor.advance(output_tokens)
        return cursor.draft(k)
