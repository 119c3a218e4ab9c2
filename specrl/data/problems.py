"""A problem as its source made it, before template and tokens, and deterministic seeds for everything random."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer; `demonstration` is a response that earns full reward."""

    question: str
    answer: str
    demonstration: str
    entry: dict[str, Any] = field(default_factory=dict)
    """What the source's own scorer needs beside the answer."""
    generator: int = 0
    """Position in `data.generators`; 0 for files."""


class Generator(Protocol):
    """An endless source of problems with its own scorer."""

    def problems(self, seed: int) -> Iterator[Problem]:
        """Endless, and a pure function of the seed."""
        ...

    def score(self, response: str, answer: str, entry: dict[str, Any]) -> float:
        """Reward of a response, 0 to 1."""
        ...


class ProblemSource(Protocol):
    """Where problems come from: a mixture of generators, or a file."""

    def draw(self, stream: str, step: int, count: int) -> list[Problem]:
        """`count` problems of a stream's step: a pure function of (seed, stream, step), none of them held out."""
        ...

    def held_out(self, count: int) -> list[Problem]:
        """The first `count` distinct held-out problems."""
        ...


def derive_seed(*parts: int | str) -> int:
    """63-bit seed from a tuple of numbers and names: SHA-256, so that neighbouring inputs give unrelated seeds."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def is_held_out(question: str, fraction: float) -> bool:
    """Whether a generated problem belongs to the held-out share: decided by its text alone, whatever stream drew it."""
    return derive_seed("held-out", question) < fraction * 2**63
