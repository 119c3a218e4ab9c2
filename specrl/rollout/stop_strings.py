"""Stop strings, as a function of a response's tokens alone: how many tokens come at once changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BYTES_PER_CHARACTER = 4
"""The most bytes of a character in UTF-8; a token that is text has one byte at least."""


class StopStrings:
    """Finds where the first of some strings ends in a response; special tokens are text here."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        longest = max((len(string) for string in strings), default=0)
        self._window = BYTES_PER_CHARACTER * (longest + 1)
        self._may_end: dict[int, bool] = {}

    def length(self, tokens: Sequence[int], first: int) -> int | None:
        """The number of tokens up to the first one that completes a string; None if none does.

        Args:
            first: The tokens before this one complete no string.
        """
        for end in range(first + 1, len(tokens) + 1):
            if self._completes(tokens[end - 1]) and self._found(self._text(tokens[max(0, end - self._window) : end])):
                return end
        return None

    def rest(self, tokens: Sequence[int]) -> str:
        """What stands behind the string in the token that completes it; empty where the last token completes none."""
        text = self._text(tokens[-self._window :])
        ends = [text.find(string) + len(string) for string in self._strings if string in text]
        return text[min(ends) :] if ends else ""

    def _completes(self, token: int) -> bool:
        # Asked once for each id, because decoding the last tokens again for every new one is slow beside a small model.
        if token not in self._may_end:
            text, ends = self._text([token]), {string[-1] for string in self._strings}
            # A space may get lost where a text begins with it, and a token may be a part of a character.
            self._may_end[token] = " " in ends or "\ufffd" in text or any(end in text for end in ends)
        return self._may_end[token]

    def _found(self, text: str) -> bool:
        return any(string in text for string in self._strings)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
