"""The text of one engine to draft from: responses stored for prompts, and the latest ones to any prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from specrl.rollout.drafts.text_index import ANY_PROMPT, Text, TextIndex

UNKNOWN_PROMPT = ANY_PROMPT - 1
"""The number of a prompt for which nothing is stored."""
NOTEWORTHY = 8
"""The index is made anew once what it lacks is one part of so many."""
Tokens = tuple[int, ...]


class TextStore:
    """Holds the texts, and indexes them when a generation begins."""

    def __init__(self, recent_tokens: int) -> None:
        """Begin without text; of the latest responses keep so many tokens, in whole responses."""
        self._most = recent_tokens
        self._prompts: dict[Tokens, int] = {}  # the numbers of the prompts that responses are stored for
        self._stored: list[Text] = []
        self._own: set[tuple[int, int | None]] = set()  # the prompt and seed of each stored response
        self._recent: list[Text] = []
        self._index: TextIndex | None = None
        self._unindexed = 0  # the tokens of responses that the index lacks

    def store(
        self, texts: Mapping[Tokens, Sequence[Sequence[int]]], seeds: Mapping[Tokens, Sequence[int]] | None = None
    ) -> None:
        """Replace the stored responses; see `Engine.set_replay`."""
        self._prompts = {prompt: number for number, prompt in enumerate(texts)}
        self._stored, self._index = [], None
        for number, (prompt, rows) in enumerate(texts.items()):
            known: Sequence[int | None] = (seeds or {}).get(prompt) or [None] * len(rows)
            self._stored += [
                Text(np.asarray(row, np.int32), number, seed) for row, seed in zip(rows, known, strict=True)
            ]
        self._own = {(text.prompt, text.seed) for text in self._stored}

    def remember(self, response: Sequence[int]) -> None:
        """Add a response, which may be drafted from in the next generation."""
        if self._most:
            self._recent.append(Text(np.asarray(response, np.int32)))
            self._unindexed += len(response)

    def forget_recent(self) -> None:
        """Drop all responses that were remembered."""
        self._recent, self._index = [], None

    def number_of(self, prompt_tokens: Sequence[int]) -> int:
        """The number that the prompt's stored responses have, or `UNKNOWN_PROMPT`."""
        return self._prompts.get(tuple(prompt_tokens), UNKNOWN_PROMPT) if self._prompts else UNKNOWN_PROMPT

    def has_own(self, prompt_tokens: Sequence[int], seed: int) -> bool:
        """Whether a response to the prompt with this seed is stored."""
        return (self.number_of(prompt_tokens), seed) in self._own

    def stored(self, prompt_tokens: Sequence[int], seed: int) -> tuple[int, int]:
        """How many responses to the prompt are stored, and how many tokens the one of this seed has."""
        number = self.number_of(prompt_tokens)
        found = [text for text in self._stored if text.prompt == number]
        return len(found), next((len(text.tokens) for text in found if text.seed == seed), 0)

    def index(self, device: torch.device | str) -> TextIndex:
        """An index of all texts, the latest responses before older ones; some of the latest may be missing."""
        if self._index is None or NOTEWORTHY * self._unindexed >= len(self._index.tokens):
            self._unindexed = 0
            self._recent = self._latest(self._recent)
            self._index = TextIndex([*self._stored, *reversed(self._recent)], device)
        return self._index

    def _latest(self, texts: list[Text]) -> list[Text]:
        totals = np.cumsum([len(text.tokens) for text in reversed(texts)])
        return texts[len(texts) - int(np.searchsorted(totals, self._most, side="right")) :]
