"""Stop strings as a function of a response's tokens alone, however many tokens arrive at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BYTES_PER_CHARACTER = 4
"""The most bytes of a character in UTF-8; a text token has at least one byte."""


class StopStrings:
    """Finds where the first of several strings ends in a response; special tokens count as text."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        longest = max((len(string) for string in strings), default=0)
        self._window = BYTES_PER_CHARACTER * (longest + 1)
        self._may_end: dict[int, bool] = {}

    def length(self, tokens: Sequence[int], first: int) -> int | None:
        """The number of tokens up to the first one that completes a string; None if none does.

        Args:
            first: The first token to check; those before it complete no string.
        """
        for end in range(first + 1, len(tokens) + 1):
            if self._completes(tokens[end - 1]) and self._found(self._text(tokens[max(0, end - self._window) : end])):
                return end
        return None

    def rest(self, tokens: Sequence[int]) -> str:
        """The text after the stop string within its last token; empty if the last token completes no string."""
        text = self._text(tokens[-self._window :])
        ends = [text.find(string) + len(string) for string in self._strings if string in text]
        return text[min(ends) :] if ends else ""

    def _completes(self, token: int) -> bool:
        # Cached by id, because decoding the last tokens anew for every token is slow compared with a small model.
        if token not in self._may_end:
            text, ends = self._text([token]), {string[-1] for string in self._strings}
            # Decoding may drop a leading space, and a token may be part of a character.
            self._may_end[token] = " " in ends or "\ufffd" in text or any(end in text for end in ends)
        return self._may_end[token]

    def _found(self, text: str) -> bool:
        return any(string in text for string in self._strings)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
