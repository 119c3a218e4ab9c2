"""Requests that follow stored and recent text, from which the section `sampler` has drafts made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.drafts.device_drafts import Batch, DeviceDrafts, Requests
from specrl.rollout.drafts.text_index import ANY_PROMPT, END, NOTHING, Text, TextIndex

PROMPT_TOKENS = 8
K, PASSES = 15, 3
NEW = 3  # the tokens of each iteration: every request has accepted two drafts
ITERATIONS = 3


class FollowedTexts:
    """Requests: a third each follow text of their own seed, other text of their prompt, and text of any prompt."""

    def __init__(self, requests: int, length: int, vocab_size: int, device: torch.device) -> None:
        """Make up the text, a response of `length` tokens for each request, and index it on the device."""
        random = np.random.default_rng(requests)
        texts = random.integers(3, vocab_size, (requests, length), dtype=np.int32)
        drafter = random.integers(3, vocab_size, (requests, PASSES))
        drafter[::2, 1:] = END  # where it was not sure
        owners = [(ANY_PROMPT if row % 3 == 2 else row, None if row % 3 else row) for row in range(requests)]
        self._index = TextIndex([Text(text, *owner) for text, owner in zip(texts, owners, strict=True)], device)
        spans = [self._index.spans.get((row, row), (0, 0)) for row in range(requests)]
        facts = [(row, row + 1, PROMPT_TOKENS + length, *span) for row, span in enumerate(spans)]
        known = torch.tensor(facts, device=device), torch.from_numpy(np.pad(texts, ((0, 0), (PROMPT_TOKENS, 0))))
        prompts = torch.full((requests,), PROMPT_TOKENS, dtype=torch.int32, device=device)
        self._requests = [
            Requests(known[0], prompts, prompts + length // 2 + NEW * iteration, known[1].to(device))
            for iteration in range(ITERATIONS + 1)
        ]
        slots = torch.from_numpy(random.permutation(requests)).int().to(device)
        self._batch, self._drafter = Batch(slots, torch.full_like(slots, NEW)), torch.from_numpy(drafter).to(device)

    def follow(self, kind: type[DeviceDrafts]) -> tuple[list[Tensor], dict[str, Callable[[], object]]]:
        """Have drafts of this kind chosen and compared.

        Return them with all that is kept in the end, and calls that compare and choose the last ones again.
        """
        made = kind(len(self._drafter), K, self._drafter.device)
        made.index, made.has_drafter = self._index, True
        made.begin([2])
        made.expect(np.random.default_rng(0).random((K + 1, NOTHING)), recalls=True)
        *iterations, last = self._requests
        chosen = []
        for requests in iterations:
            made.observe(requests, self._batch)
            chosen.append(made.choose(requests, self._batch, self._drafter, K))
        kept = made.made_at, made.tokens, made.kinds, made.sources, made.lengths, made.by_kind, made.offered
        again: dict[str, Callable[[], object]] = {"compare text": partial(made.observe, last, self._batch)}
        again["draft from text"] = partial(made.choose, iterations[-1], self._batch, self._drafter, K)
        return [*chosen, *(values.clone() for values in kept)], again
