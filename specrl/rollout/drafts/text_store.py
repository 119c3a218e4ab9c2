"""One engine's texts to draft from: responses stored for prompts, the latest responses to any prompt, and siblings.

Siblings are a generation's finished responses to a prompt that other requests are still answering.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specrl.rollout.drafts.text_index import Text, TextIndex, number_of

NOTEWORTHY = 8
"""The index is rebuilt once the text it lacks is one part in this many."""


class StoredText(NamedTuple):
    """A response to draft from when its prompt is asked."""

    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    seed: int | None = None
    """The seed with which it was sampled, if known: a request with this seed reads the text ahead."""


class TextStore:
    """Holds the texts, and indexes them when a generation begins and repeatedly as siblings finish."""

    def __init__(self, recent_tokens: int = 0) -> None:
        self.recent_tokens = recent_tokens
        """The number of tokens kept of the latest responses, and of siblings, in whole responses."""
        self._stored: dict[int, list[tuple[NDArray[np.int32], int | None]]] = {}  # tokens and seed, by prompt
        self._recent: list[Text] = []
        self._siblings: list[Text] = []
        self._unfinished: Counter[int] = Counter()  # the requests of this generation by prompt
        self._index: TextIndex | None = None
        self._unindexed = 0  # the number of response tokens not yet in the index

    def store(self, texts: Iterable[StoredText]) -> None:
        """Replace the stored responses; see `Engine.set_replay`."""
        self._stored, self._index = {}, None
        for text in texts:
            row = np.asarray(text.tokens, np.int32), text.seed
            self._stored.setdefault(number_of(text.prompt_tokens), []).append(row)

    def begin(self, prompts: Iterable[Sequence[int]] = ()) -> None:
        """Begin a generation that answers these prompts, one for each request, and remembers its responses."""
        self._unfinished = Counter(map(number_of, prompts))
        if self._siblings:
            self._siblings, self._index = [], None

    def remember(self, response: Sequence[int], prompt_tokens: Sequence[int] = ()) -> None:
        """Add a response to draft from in the next generation and, for its siblings, in this one."""
        if not self.recent_tokens:
            return
        tokens, prompt = np.asarray(response, np.int32), number_of(prompt_tokens)
        self._recent.append(Text(tokens))
        self._unindexed += len(response)
        if self._unfinished[prompt] > 1:  # siblings are still running
            self._unfinished[prompt] -= 1
            self._siblings.append(Text(tokens, prompt))

    @property
    def has_siblings(self) -> bool:
        """Whether there are finished responses from which requests that still run may draft."""
        return bool(self._siblings)

    def forget_recent(self) -> None:
        """Drop all remembered responses."""
        self._recent, self._index = [], None

    def stored(self, prompt_tokens: Sequence[int], seed: int) -> tuple[int, int]:
        """The number of stored responses to the prompt, and of tokens in the one with this seed."""
        return len(self._stored.get(number_of(prompt_tokens), ())), len(self.own(prompt_tokens, seed))

    def longest(self, prompt_tokens: Sequence[int]) -> int | None:
        """The length of the longest stored response to the prompt; None if there is none."""
        stored = self._stored.get(number_of(prompt_tokens), ())
        return max((len(tokens) for tokens, _ in stored), default=None)

    def own(self, prompt_tokens: Sequence[int], seed: int) -> list[int]:
        """The stored response to the prompt with this seed; of several, the first."""
        stored = self._stored.get(number_of(prompt_tokens), ())
        return next((tokens.tolist() for tokens, own in stored if own == seed), [])

    def index(self, device: torch.device | str) -> TextIndex:
        """An index of all texts, the latest responses before older ones; some of the latest may be missing."""
        if self._index is None or NOTEWORTHY * self._unindexed >= len(self._index.tokens):
            self._unindexed = 0
            self._recent, self._siblings = self._latest(self._recent), self._latest(self._siblings)
            stored = [Text(tokens, number) for number, rows in self._stored.items() for tokens, _ in rows]
            self._index = TextIndex([*stored, *self._siblings, *reversed(self._recent)], device)
        return self._index

    def _latest(self, texts: list[Text]) -> list[Text]:
        totals = np.cumsum([len(text.tokens) for text in reversed(texts)])
        return texts[len(texts) - int(np.searchsorted(totals, self.recent_tokens, side="right")) :]
