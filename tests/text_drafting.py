"""What drafts from text are, token by token in Python: the reference of the index and the counters on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from specrl.rollout.drafts.device_drafts import Batch, DeviceDrafts
from specrl.rollout.drafts.text_index import ANY_PROMPT, END, LONGEST, RECENT_TEXT, SIZES, STORED, Text, TextIndex


class Ask(NamedTuple):
    prompt: int
    seed: int


class Candidate(NamedTuple):
    kind: int
    tokens: list[int]


def own_text(texts: Sequence[Text], output: Sequence[int], ask: Ask) -> list[int]:
    for text in texts:
        if (text.prompt, text.seed) == ask:
            start = max(0, len(output) - LONGEST)
            agrees = list(text.tokens[start : len(output)]) == list(output[start:])
            return list(text.tokens[len(output) :]) if agrees else []
    return []


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


def candidates(texts: Sequence[Text], output: Sequence[int], ask: Ask, k: int) -> list[Candidate]:
    """All drafts from text that there are for a response, its own seed's first."""
    stored = [text for text in texts if text.prompt == ask.prompt]
    recent = [text for text in texts if text.prompt == ANY_PROMPT]
    own = own_text(stored, output, ask)
    found = [Candidate(0, own) if own else None]
    found += [by_last_tokens(stored, output, STORED), by_last_tokens(recent, output, RECENT_TEXT)]
    return [Candidate(one.kind, one.tokens[:k]) for one in found if one is not None]


class Outcome(NamedTuple):
    kind: int
    drafted: int
    accepted: int


def follow(
    texts: Sequence[Text], ask: Ask, answer: Sequence[int], limit: int, k: int, worth: Callable[[int], float]
) -> tuple[list[Outcome], int]:
    """The drafts in the course of a response that ends as `answer` does, each of `k` tokens, and its iterations.

    Where a draft has fewer tokens the last token of the response stands, and that may turn out to be right as well.
    """
    outcomes, length, steps = [], 1, 1
    while length < len(answer):
        output = answer[:length]
        possible = [one for one in candidates(texts, output, ask, min(k, limit - length - 1)) if one.tokens]
        best = max(possible, key=lambda one: worth(one.kind), default=None)
        drafted = best.tokens if best is not None else []
        read = [*drafted, *[output[-1]] * (k - len(drafted))]
        right = 0
        while right < k and length + right < len(answer) and read[right] == answer[length + right]:
            right += 1
        if best is not None:
            outcomes.append(Outcome(best.kind, len(drafted), min(right, len(drafted))))
        length, steps = length + right + 1, steps + 1
    return outcomes, steps


def last_tokens(output: list[int]) -> list[int]:
    return ([END] * LONGEST + output)[: -LONGEST - 1 : -1]


class Run:
    """Requests that take turns in the slots of a runner, whose next tokens are known in advance."""

    def __init__(
        self, texts: list[Text], answers: list[list[int]], slots: int, stop: int, k: int, device: str = "cpu"
    ) -> None:
        self.texts, self.answers, self.stop, self.slots = texts, answers, stop, slots
        self.asks = [Ask(index % 2, 7 + index % 3) for index in range(len(answers))]
        self.prompts = [3 + index % 4 for index in range(len(answers))]
        self.limits = [
            prompt + len(answer) + index % 2
            for index, (prompt, answer) in enumerate(zip(self.prompts, answers, strict=True))
        ]
        self.k, self.device = k, device
        self.drafts = DeviceDrafts(slots, k, device)
        self.drafts.index = TextIndex(texts, device)
        self.drafts.begin(len(answers), [stop])
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
            batch = Batch(*(torch.tensor(column, device=self.device) for column in zip(*results, strict=True)))
            with self.around():
                self.drafts.observe(batch, self.all_tokens)
                chosen = self.drafts.choose(batch, self.all_tokens, None, self.k)
            for (slot, state), draft in zip(list(running.items()), chosen.tolist(), strict=True):
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
        ask, verified = self.asks[request], len(draft) if length else 0
        total = self.prompts[request] + state[1]
        return (
            slot,
            request + 1,
            ask.prompt,
            ask.seed,
            self.prompts[request],
            total,
            self.limits[request],
            new,
            verified + 1 - new,
        )
