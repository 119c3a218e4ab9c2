"""Problems and the prompts made from them, the protocols of their sources, and deterministic seeds."""

from __future__ import annotations

import hashlib
import json
import math
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


Fit = Callable[[Sequence[Problem]], list[Problem | Misfit]]
"""Problems -> each as it can be asked, or a misfit in its place."""


def fit_all(problems: Sequence[Problem]) -> list[Problem | Misfit]:
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


class ProblemSource(Protocol):
    """The source of a run's problems: a mixture of generators, or a file."""

    def draw(self, stream: str, step: int, count: int, drawn: int) -> list[Problem]:
        """`count` problems for a step of a stream, none of them held out.

        They are a pure function of the run's seed and the arguments.

        Args:
            drawn: The number of problems that the stream gave for the steps before.
        """
        ...

    def held_out(self, count: int, patience_s: float = math.inf) -> list[Problem]:
        """The first `count` distinct held-out problems, or those that were found within `patience_s` seconds.

        Raises:
            ConfigError: There are fewer.
        """
        ...

    def notes(self, count: int) -> list[str]:
        """A line for each thing about the problems that a user may not expect, where a step asks `count`."""
        ...

    def trains_on(self, question: str) -> bool:
        """Whether this question is known to be among those that are trained on."""
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
