"""Requests that follow stored and recent text, from which the section `sampler` has drafts made."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.drafts.device_drafts import Batch, DeviceDrafts, Requests
from specrl.rollout.drafts.text_index import ANY_PROMPT, END, NOTHING, Text, TextIndex

PROMPT_TOKENS = 8
K = 15
PASSES = 3
NEW = 3  # the tokens of each iteration; every request has accepted two drafts
ITERATIONS = 3


class FollowedTexts:
    """Requests: a third each follow text of their own seed, other text of their prompt, and text of any prompt."""

    def __init__(self, requests: int, length: int, vocab_size: int, device: torch.device) -> None:
        """Make up the text, a response of `length` tokens for each request, and index it on the device."""
        random = np.random.default_rng(requests)
        texts = random.integers(3, vocab_size, (requests, length), dtype=np.int32)
        owners = [ANY_PROMPT if row % 3 == 2 else row for row in range(requests)]
        seeds = [row if row % 3 == 0 else None for row in range(requests)]
        found = zip(texts, owners, seeds, strict=True)
        self._index = TextIndex([Text(text, owner, seed) for text, owner, seed in found], device)
        self._num_slots, self._device = requests, device
        spans = [self._index.spans.get((row, row), (0, 0)) for row in range(requests)]
        limit, half = PROMPT_TOKENS + length, PROMPT_TOKENS + length // 2
        facts = torch.tensor([[row, row + 1, limit, *span] for row, span in enumerate(spans)], device=device)
        tokens = torch.from_numpy(np.pad(texts, ((0, 0), (PROMPT_TOKENS, 0)))).to(device)
        lengths = torch.full((ITERATIONS + 2, requests), PROMPT_TOKENS, dtype=torch.int32, device=device)
        for iteration in range(ITERATIONS + 1):
            lengths[iteration + 1] = half + NEW * iteration
        self._requests = [Requests(facts, lengths[0], row, tokens) for row in lengths[1:]]
        slots = torch.from_numpy(random.permutation(requests)).int().to(device)
        self._batch = Batch(slots, torch.full_like(slots, NEW))
        drafter = random.integers(3, vocab_size, (requests, PASSES))
        drafter[::2, 1:] = END  # where it was not sure
        self._drafter = torch.from_numpy(drafter).to(device)

    def drafts(self, kind: type[DeviceDrafts]) -> DeviceDrafts:
        """Drafts of this kind, at their beginning."""
        made = kind(self._num_slots, K, self._device)
        made.index, made.has_drafter = self._index, True
        made.begin([2])
        made.expect(np.random.default_rng(0).random((K + 1, NOTHING)), recalls=True)
        return made

    def iterate(self, made: DeviceDrafts) -> list[Tensor]:
        """Have drafts chosen and compared; return them, and all that is kept in the end."""
        chosen = []
        for requests in self._requests[:-1]:
            made.observe(requests, self._batch)
            chosen.append(made.choose(requests, self._batch, self._drafter, K))
        return [*chosen, made.made_at, made.tokens, made.kinds, made.sources, made.lengths, made.by_kind, made.offered]

    def observe(self, made: DeviceDrafts) -> None:
        """Compare the last drafts of `iterate` with what comes after them, as often as one likes."""
        made.observe(self._requests[-1], self._batch)

    def choose(self, made: DeviceDrafts) -> None:
        """Choose the last drafts of `iterate` again."""
        made.choose(self._requests[-2], self._batch, self._drafter, K)
