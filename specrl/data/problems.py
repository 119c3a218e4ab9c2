"""Problems and the prompts made from them, the protocol of generators, and deterministic seeds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Problem:
    """A question with its reference answer."""

    question: str
    """The question, before the template is applied."""
    answer: str
    """The reference answer."""
    demonstration: str
    """A response that earns full reward."""
    entry: dict[str, Any] = field(default_factory=dict)
    """The data that the generator's own scorer needs besides the answer; for files the other columns of the row."""
    generator: int = 0
    """The generator's position in `data.generators`; 0 for files."""
    context: list[dict[str, Any]] = field(default_factory=list)
    """The messages before the question, as chat templates read them."""

    @property
    def identity(self) -> str:
        """What tells it from other problems: all that is asked."""
        return json.dumps([self.context, self.question]) if self.context else self.question


@dataclass(frozen=True)
class Prompt:
    """A problem as the policy gets it, with what its reward needs."""

    id: int
    """A 63-bit hash of stream, text and occurrence: unique within a batch, and the same in every run."""
    text: str
    """The question with the template applied."""
    tokens: list[int]
    """The text as token ids."""
    answer: str
    """The reference answer."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The problem's `question`, before the template, and `generator` and `entry` for the generator's own scorer."""


@dataclass(frozen=True)
class Misfit:
    """A problem that no prompt can be made of, or whose prompt is too long."""

    text: str
    """What is wrong with it."""
    rule: Literal["unusable", "drop", "refuse"] = "unusable"
    """`drop` and `refuse` are what `data.overlong` says about a prompt that is too long."""


@dataclass
class Counts:
    """What became of the problems that were looked at."""

    seen: int = 0
    overlong: int = 0
    """Those whose prompts were longer than the limit, dropped or truncated."""
    unusable: int = 0
    """Generated ones that no prompt could be made of."""
    longest: int = 0
    """The tokens of the longest prompt, before it was dropped or truncated."""

    def add(self, other: Counts) -> None:
        """Count what was counted elsewhere too."""
        self.seen, self.overlong = self.seen + other.seen, self.overlong + other.overlong
        self.unusable, self.longest = self.unusable + other.unusable, max(self.longest, other.longest)


Fit = Callable[[Sequence[Problem], Counts], list[Problem | Misfit]]
"""Problems -> each as it can be asked, or a misfit in its place; all are counted."""


def fit_all(problems: Sequence[Problem], _: Counts) -> list[Problem | Misfit]:
    """All problems as they are, for checks that are made without a tokenizer."""
    return list(problems)


class Generator(Protocol):
    """An endless source of problems, with its own scorer."""

    def problems(self, seed: int) -> Iterator[Problem]:
        """Yield problems without end; they depend on the seed and the generator's parameters alone."""
        ...

    def score(self, response: str, answer: str, entry: dict[str, Any]) -> float:
        """The reward of a response, 0 to 1.

        Args:
            answer: `Problem.answer`.
            entry: `Problem.entry`.
        """
        ...


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed for numbers and names; being made by SHA-256, the seeds of similar inputs are unrelated."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def is_held_out(question: str, fraction: float) -> bool:
    """Whether a generated problem is held out, which its text alone decides, whatever stream drew it.

    Args:
        fraction: `data.validation_fraction`, the share of all questions that is held out.
    """
    return derive_seed("held-out", question) < fraction * 2**63
