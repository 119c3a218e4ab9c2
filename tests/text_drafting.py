"""What drafts from text are, token by token in Python: the reference of the index and the counters on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specrl.rollout.drafts.acceptance import CONTINUED_DRAFT, DRAFTER, RECENT, REPLAY
from specrl.rollout.drafts.device_drafts import NUM_FACTS, Batch, DeviceDrafts, Requests
from specrl.rollout.drafts.text_index import (
    ANY_PROMPT,
    CONTINUED,
    DRAFTERS,
    END,
    LONGEST,
    NOTHING,
    RECENT_TEXT,
    SIZES,
    SOURCES,
    STORED,
    Text,
    TextIndex,
)


class Candidate(NamedTuple):
    kind: int
    tokens: list[int]


def by_last_tokens(texts: Sequence[Text], output: Sequence[int], first_kind: int) -> Candidate | None:
    """What follows the longest agreement: the most common next token, and then the first text that has it."""
    padded = [END] * LONGEST + list(output)
    for index, size in enumerate(SIZES):
        found: list[list[int]] = []
        for text in texts:
            row = [END] * LONGEST + list(text.tokens)
            for place in range(LONGEST + 1, len(row)):
                window = row[place - size : place]
                if window == padded[-size:] and (text.prompt != ANY_PROMPT or END not in window):
                    found.append(row[place:])
        if found:
            token = Counter(ahead[0] for ahead in found).most_common(1)[0][0]
            return Candidate(first_kind + index, next(ahead for ahead in found if ahead[0] == token))
    return None


def candidates(texts: Sequence[Text], output: Sequence[int], prompt: int, k: int) -> list[Candidate]:
    """All drafts from text that there are for a response to the prompt of this number."""
    stored = [text for text in texts if text.prompt == prompt]
    recent = [text for text in texts if text.prompt == ANY_PROMPT]
    found = [by_last_tokens(stored, output, STORED), by_last_tokens(recent, output, RECENT_TEXT)]
    return [Candidate(one.kind, one.tokens[:k]) for one in found if one is not None]


def best_draft(
    texts: Sequence[Text], output: Sequence[int], prompt: int, room: int, k: int, worth: Sequence[float]
) -> Candidate:
    """The draft of at most `room` tokens that is expected to bring most."""
    possible = [one for one in candidates(texts, output, prompt, min(k, max(room, 0))) if one.tokens]
    return max(possible, key=lambda one: worth[one.kind], default=Candidate(NOTHING, []))


def continued(
    texts: Sequence[Text], output: Sequence[int], prompt: int, drafter: list[int], k: int, worth: Sequence[float]
) -> list[int]:
    """The drafter's tokens and those of the text behind them that is worth most, `k` together."""
    read = [*output, *drafter]
    stored = by_last_tokens([text for text in texts if text.prompt == prompt], read, STORED)
    recent = by_last_tokens([text for text in texts if text.prompt == ANY_PROMPT], read, RECENT_TEXT)
    found = [one for one in (stored, recent) if one is not None]
    after = max(found, key=lambda one: worth[one.kind], default=Candidate(NOTHING, []))
    return [*drafter, *after.tokens][:k]


class Compared(NamedTuple):
    """How often each kind was compared and right, by position, [kinds, k]."""

    seen: NDArray[np.int64]
    right: NDArray[np.int64]


def follow(
    texts: Sequence[Text], prompt: int, answer: Sequence[int], limit: int, k: int, worth: Sequence[float]
) -> Compared:
    """What drafts come to in the course of a response that ends as `answer` does, with drafts of `k` tokens.

    Where a draft has fewer tokens the last token of the response stands, and that may turn out to be right as well.
    """
    found, length = Compared(*(np.zeros((NOTHING + 1, k), np.int64) for _ in range(2))), 1
    while length < len(answer):
        output, room = answer[:length], limit - length - 1
        drafted = best_draft(texts, output, prompt, room, k, worth).tokens
        read = [*drafted, *[output[-1]] * (k - len(drafted))]
        new = 1
        while new <= k and length + new < len(answer) and read[new - 1] == answer[length + new - 1]:
            new += 1
        for kind, tokens in candidates(texts, output, prompt, min(k, max(room, 0))):
            for place, (token, right) in enumerate(zip(tokens[:new], answer[length : length + new], strict=False)):
                found.seen[kind, place] += 1
                if token != right:
                    break
                found.right[kind, place] += 1
        length += new
    return found


def last_tokens(output: list[int]) -> list[int]:
    return ([END] * LONGEST + output)[: -LONGEST - 1 : -1]


def laid_out(rows: Sequence[Sequence[int]], all_tokens: torch.Tensor) -> tuple[Requests, Batch]:
    """Requests as a runner has them; of each are given its slot, number, prompt, the lengths of prompt and sequence,
    its limit and the tokens that it has just got."""
    device, num_slots = all_tokens.device, len(all_tokens)
    facts = torch.zeros(num_slots, NUM_FACTS, dtype=torch.int64)
    lengths = torch.ones(num_slots, dtype=torch.int32)
    for slot, row, prompt, prompt_length, length, limit, _ in rows:
        facts[slot] = torch.tensor([prompt, row, limit, prompt_length])
        lengths[slot] = length
    slots, new = (torch.tensor([row[at] for row in rows], dtype=torch.int32, device=device) for at in (0, -1))
    known = (values.to(device) for values in (facts, lengths))
    return Requests(*known, all_tokens), Batch(slots, new)


def source_of(kind: int) -> str:
    if kind < RECENT_TEXT:
        return REPLAY
    return {DRAFTERS: DRAFTER, CONTINUED: CONTINUED_DRAFT}.get(kind, RECENT)


class Run:
    """Requests that take turns in the slots of a runner, whose next tokens are known in advance."""

    def __init__(
        self,
        texts: list[Text],
        answers: list[list[int]],
        slots: int,
        stop: int,
        k: int,
        device: str = "cpu",
        drafts: type[DeviceDrafts] = DeviceDrafts,
    ) -> None:
        self.texts, self.answers, self.stop, self.slots = texts, answers, stop, slots
        self.asks = [index % 2 for index in range(len(answers))]
        self.prompts = [3 + index % 4 for index in range(len(answers))]
        self.limits = [
            prompt + len(answer) + index % 2
            for index, (prompt, answer) in enumerate(zip(self.prompts, answers, strict=True))
        ]
        self.k, self.device = k, device
        self.drafts = drafts(slots, k, device)
        self.drafts.index = TextIndex(texts, device)
        self.drafts.begin([stop])
        self.all_tokens = torch.zeros(slots, 80, dtype=torch.int32, device=device)

    def run(self, worth: list[float], ghosts: bool) -> None:
        self.drafts.expect(np.tile(worth, (self.k + 1, 1)), recalls=True)
        waiting = list(range(len(self.answers)))[::-1]
        running: dict[int, list[Any]] = {}  # by slot: request, tokens so far, its draft, iterations past its end
        while waiting or running:
            for slot in range(self.slots):
                if slot not in running and waiting:
                    running[slot] = [waiting.pop(), 0, [], 0]
                    self.all_tokens[slot, : self.prompts[running[slot][0]]] = 9
            results = [self.step(slot, state) for slot, state in running.items()]
            known, batch = laid_out(results, self.all_tokens)
            with self.around():
                self.drafts.observe(known, batch)
                chosen = self.drafts.choose(known, batch, None, self.k)
            for (slot, state), draft in zip(list(running.items()), chosen.tolist(), strict=True):
                self.check(slot, state, draft, worth)
                state[2] = draft
                if state[1] >= len(self.answers[state[0]]):
                    state[3] += 1
                    if state[3] > ghosts:
                        del running[slot]

    def around(self) -> AbstractContextManager[None]:
        """What goes on around the operations on the device."""
        return nullcontext()

    def step(self, slot: int, state: list[Any]) -> tuple[int, ...]:
        request, length, draft, _ = state
        answer = [*self.answers[request], *[1] * (self.k + 2)]  # what comes past the end is thrown away
        right = 0
        while right < len(draft) and draft[right] == answer[length + right]:
            right += 1
        ends = [place for place in range(length, length + right + 1) if answer[place] == self.stop]
        new = min([right + 1, *[place - length + 1 for place in ends]])
        room = self.limits[request] - self.prompts[request] - length
        new = min(new, max(room, 1))
        state[1] = length + new
        begin = self.prompts[request] + length
        self.all_tokens[slot, begin : begin + new] = torch.tensor(answer[length : length + new], dtype=torch.int32)
        total = self.prompts[request] + state[1]
        return slot, request + 1, self.asks[request], self.prompts[request], total, self.limits[request], new

    def check(self, slot: int, state: list[Any], draft: list[int], worth: list[float]) -> None:
        request, length, *_ = state
        if length >= len(self.answers[request]):
            return
        output, room = self.answers[request][:length], self.limits[request] - self.prompts[request] - length - 1
        kind, tokens = best_draft(self.texts, output, self.asks[request], room, self.k, worth)
        assert draft == [*tokens, *[output[-1]] * (self.k - len(tokens))]
        assert int(self.drafts.lengths[slot]) == len(tokens)
        assert kind == NOTHING or SOURCES[int(self.drafts.sources[slot])] == source_of(kind)


def iterate(
    drafts: type[DeviceDrafts],
    texts: list[Text],
    rows: list[list[tuple[int, ...]]],
    tokens: torch.Tensor,
    drafter: torch.Tensor | None,
    k: int,
    length: int,
) -> list[torch.Tensor]:
    """Have drafts chosen and then compared in iterations with the requests of `rows`, as `laid_out` takes them.

    Returns:
        The drafts of each iteration, and all that is kept in the end.
    """
    made = drafts(len(tokens), k)
    made.index, made.has_drafter = TextIndex(texts), True
    made.begin([3, 2])
    worth = np.random.default_rng(k).random((k + 1, NOTHING)).round(1).cumsum(0)
    made.expect(worth, recalls=length % 2 == 0)
    found = []
    for of_iteration in rows:
        known, batch = laid_out(of_iteration, tokens)
        made.observe(known, batch)
        found.append(made.choose(known, batch, None if drafter is None else drafter[: len(of_iteration)], length))
    kept = made.made_at, made.tokens, made.kinds, made.sources, made.lengths, made.by_kind, made.offered
    return [*found, *kept]
