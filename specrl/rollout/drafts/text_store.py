"""The text of one engine to draft from: responses stored for prompts, and the latest ones to any prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specrl.rollout.drafts.text_index import ANY_PROMPT, Text, TextIndex

UNKNOWN_PROMPT = ANY_PROMPT - 1
"""The number of a prompt for which nothing is stored."""
NOTEWORTHY = 8
"""The index is made anew once what it lacks is one part of so many."""
Tokens = tuple[int, ...]


class TextStore:
    """Holds the texts between generations, and indexes them when a generation begins."""

    def __init__(self, recent_tokens: int) -> None:
        """Begin without text.

        Args:
            recent_tokens: The number of tokens of the latest responses to keep; older responses are dropped whole.
        """
        self._most = recent_tokens
        self._prompts: dict[Tokens, int] = {}
        self._stored: list[Text] = []
        self._own: set[tuple[int, int | None]] = set()
        """The prompt and seed of each stored response."""
        self._recent: list[NDArray[np.int32]] = []
        self._index: TextIndex | None = None
        self._unindexed = 0
        """The tokens of responses that the index lacks."""

    def store(
        self, texts: Mapping[Tokens, Sequence[Sequence[int]]], seeds: Mapping[Tokens, Sequence[int]] | None = None
    ) -> None:
        """Replace the stored responses; see `Engine.set_replay`."""
        self._prompts = {prompt: number for number, prompt in enumerate(texts)}
        self._stored = []
        for prompt, rows in texts.items():
            known: Sequence[int | None] = (seeds or {}).get(prompt) or [None] * len(rows)
            number = self._prompts[prompt]
            self._stored += [
                Text(np.asarray(row, np.int32), number, seed) for row, seed in zip(rows, known, strict=True)
            ]
        self._own = {(text.prompt, text.seed) for text in self._stored}
        self._index = None

    def remember(self, response: Sequence[int]) -> None:
        """Add a response, which may be drafted from in the next generation."""
        if self._most:
            self._recent.append(np.asarray(response, np.int32))
            self._unindexed += len(response)

    def forget_recent(self) -> None:
        """Drop all responses that were remembered."""
        self._recent, self._index = [], None

    def number_of(self, prompt_tokens: Sequence[int]) -> int:
        """Return the number that the prompt's stored responses have, or `UNKNOWN_PROMPT`."""
        return self._prompts.get(tuple(prompt_tokens), UNKNOWN_PROMPT) if self._prompts else UNKNOWN_PROMPT

    def has_own(self, prompt_tokens: Sequence[int], seed: int) -> bool:
        """Return whether a response to the prompt with this seed is stored."""
        return (self.number_of(prompt_tokens), seed) in self._own

    def stored(self, prompt_tokens: Sequence[int], seed: int) -> tuple[int, int]:
        """Return how many responses to the prompt are stored, and how many tokens the one of this seed has."""
        number = self.number_of(prompt_tokens)
        found = [text for text in self._stored if text.prompt == number]
        return len(found), next((len(text.tokens) for text in found if text.seed == seed), 0)

    def index(self, device: torch.device | str) -> TextIndex:
        """Return an index of all texts, the latest responses before older ones.

        It may lack some of the latest ones, as long as they are few beside what it has: a bubble generates many times.
        """
        if self._index is None or NOTEWORTHY * self._unindexed >= len(self._index.tokens):
            self._unindexed = 0
            kept, total = 0, 0
            for response in reversed(self._recent):
                total += len(response)
                if total > self._most:
                    break
                kept += 1
            self._recent = self._recent[len(self._recent) - kept :]
            recent = [Text(response) for response in reversed(self._recent)]
            self._index = TextIndex([*self._stored, *recent], device)
        return self._index
