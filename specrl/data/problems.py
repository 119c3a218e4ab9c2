"""Problems before they become prompts, the protocols of their sources, and deterministic seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol


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
    """The data that the generator's own scorer needs besides the answer."""
    generator: int = 0
    """The generator's position in `data.generators`; 0 for files."""


class Generator(Protocol):
    """An endless source of problems, with its own scorer."""

    def problems(self, seed: int) -> Iterator[Problem]:
        """Yield problems without end; they depend on the seed and the generator's parameters alone."""
        ...

    def score(self, response: str, answer: str, entry: dict[str, Any]) -> float:
        """Return the reward of a response, 0 to 1.

        Args:
            answer: `Problem.answer`.
            entry: `Problem.entry`.
        """
        ...


class ProblemSource(Protocol):
    """The source of a run's problems: a mixture of generators, or a file."""

    def draw(self, stream: str, step: int, count: int) -> list[Problem]:
        """Return `count` problems for a step of a stream, none of them held out.

        They are a pure function of the run's seed, the stream, the step and the count.
        """
        ...

    def held_out(self, count: int) -> list[Problem]:
        """Return the first `count` distinct held-out problems.

        Raises:
            ConfigError: There are fewer.
        """
        ...


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed for numbers and names; being made by SHA-256, the seeds of similar inputs are unrelated."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def is_held_out(question: str, fraction: float) -> bool:
    """Return whether a generated problem is held out, which its text alone decides, whatever stream drew it.

    Args:
        fraction: `data.validation_fraction`, the share of all questions that is held out.
    """
    return derive_seed("held-out", question) < fraction * 2**63
