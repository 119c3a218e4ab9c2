"""One engine's texts to draft from: responses stored for prompts, the latest responses to any prompt, and siblings.

Siblings are a generation's finished responses to a prompt that other requests are still answering.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from specrl.rollout.drafts.text_index import ANY_PROMPT, Text, TextIndex

UNKNOWN_PROMPT = ANY_PROMPT - 1
"""The number of a prompt for which nothing is stored."""
NOTEWORTHY = 8
"""The index is rebuilt once the text it lacks is one part in this many."""
Tokens = tuple[int, ...]


class TextStore:
    """Holds the texts, and indexes them when a generation begins and repeatedly as siblings finish."""

    def __init__(self, recent_tokens: int = 0) -> None:
        self.recent_tokens = recent_tokens
        """The number of tokens kept of the latest responses, and of siblings, in whole responses."""
        self._with_text: dict[Tokens, int] = {}  # the numbers of the prompts that responses are stored for
        self._prompts: dict[Tokens, int] = {}  # the same, and the numbers of this generation's prompts
        self._next_number = 0  # no number is used again while an index may hold its texts
        self._stored: list[Text] = []
        self._counts: Counter[int] = Counter()  # the stored responses by prompt
        self._longest: dict[int, int] = {}  # the length of the longest stored response, by prompt
        self._own: dict[tuple[int, int], Sequence[int]] = {}  # stored responses with known seeds, by prompt and seed
        self._recent: list[Text] = []
        self._siblings: list[Text] = []
        self._groups: Counter[Tokens] = Counter()  # the number of unfinished requests by prompt
        self._index: TextIndex | None = None
        self._unindexed = 0  # the number of response tokens not yet in the index

    def store(
        self, texts: Mapping[Tokens, Sequence[Sequence[int]]], seeds: Mapping[Tokens, Sequence[int]] | None = None
    ) -> None:
        """Replace the stored responses; see `Engine.set_replay`."""
        self._with_text = {prompt: number for number, prompt in enumerate(texts)}
        self._prompts, self._next_number = dict(self._with_text), len(texts)
        self._stored, self._siblings, self._groups, self._index, self._own = [], [], Counter(), None, {}
        for number, (prompt, rows) in enumerate(texts.items()):
            self._stored += [Text(np.asarray(row, np.int32), number) for row in rows]
            if known := (seeds or {}).get(prompt):
                self._own |= {(number, seed): row for seed, row in reversed([*zip(known, rows, strict=True)])}
        self._counts = Counter(text.prompt for text in self._stored)
        self._longest = {number: max(map(len, rows)) for number, rows in enumerate(texts.values()) if rows}

    def begin(self, prompts: Iterable[Sequence[int]] = ()) -> None:
        """Begin a generation that answers these prompts, one for each request, and remembers its responses."""
        counts = Counter(map(tuple, prompts)) if self.recent_tokens else {}
        self._groups = Counter({prompt: count for prompt, count in counts.items() if count > 1})
        self._prompts, self._siblings = dict(self._with_text), []
        for prompt in self._groups.keys() - self._prompts.keys():
            self._prompts[prompt], self._next_number = self._next_number, self._next_number + 1

    def remember(self, response: Sequence[int], prompt_tokens: Sequence[int] = ()) -> None:
        """Add a response to draft from in the next generation and, for its siblings, in this one."""
        if not self.recent_tokens:
            return
        tokens, prompt = np.asarray(response, np.int32), tuple(prompt_tokens)
        self._recent.append(Text(tokens))
        self._unindexed += len(response)
        if prompt in self._groups:
            self._groups[prompt] -= 1
            if self._groups[prompt]:
                self._siblings.append(Text(tokens, self._prompts[prompt]))

    @property
    def has_siblings(self) -> bool:
        """Whether there are finished responses from which requests that still run may draft."""
        return bool(self._siblings)

    def forget_recent(self) -> None:
        """Drop all remembered responses."""
        self._recent, self._index = [], None

    def number_of(self, prompt_tokens: Sequence[int]) -> int:
        """The prompt's number, under which its texts are indexed, or `UNKNOWN_PROMPT`."""
        return self._prompts.get(tuple(prompt_tokens), UNKNOWN_PROMPT) if self._prompts else UNKNOWN_PROMPT

    def stored(self, prompt_tokens: Sequence[int], seed: int) -> tuple[int, int]:
        """The number of stored responses to the prompt, and of tokens in the one with this seed."""
        number = self.number_of(prompt_tokens)
        return self._counts[number], len(self._own.get((number, seed), ()))

    def longest(self, prompt_tokens: Sequence[int]) -> int | None:
        """The length of the longest stored response to the prompt; None if there is none."""
        return self._longest.get(self.number_of(prompt_tokens))

    def own(self, prompt_tokens: Sequence[int], seed: int) -> list[int]:
        """The stored response to the prompt with this seed; of several, the first."""
        return list(map(int, self._own.get((self.number_of(prompt_tokens), seed), ())))

    def index(self, device: torch.device | str) -> TextIndex:
        """An index of all texts, the latest responses before older ones; some of the latest may be missing."""
        if self._index is None or NOTEWORTHY * self._unindexed >= len(self._index.tokens):
            self._unindexed = 0
            self._recent, self._siblings = self._latest(self._recent), self._latest(self._siblings)
            self._index = TextIndex([*self._stored, *self._siblings, *reversed(self._recent)], device)
        return self._index

    def _latest(self, texts: list[Text]) -> list[Text]:
        totals = np.cumsum([len(text.tokens) for text in reversed(texts)])
        return texts[len(texts) - int(np.searchsorted(totals, self.recent_tokens, side="right")) :]
