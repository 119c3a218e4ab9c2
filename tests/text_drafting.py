"""What drafts from text are, token by token in Python: the reference of the index and the counters on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specrl.rollout.drafts.text_index import ANY_PROMPT, END, LONGEST, RECENT_TEXT, SIZES, STORED, Text


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
