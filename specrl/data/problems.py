"""Problems, the prompts made from them, and deterministic seeds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A question with its reference answer."""

    question: str  # before the template is applied
    answer: str
    demonstration: str  # a response that earns full reward
    entry: dict[str, Any] = field(default_factory=dict)  # for the generator's scorer; a file's other columns
    generator: int = 0  # index into `data.generators`; 0 for files
    context: list[dict[str, Any]] = field(default_factory=list)
    """The messages before the question, as chat templates read them."""

    @property
    def identity(self) -> str:
        """Everything that is asked, which distinguishes the problem from others."""
        return json.dumps([self.context, self.question]) if self.context else self.question

    @property
    def metadata(self) -> dict[str, Any]:
        """What a reward may need besides prompt and answer."""
        return {name: getattr(self, name) for name in ("question", "generator", "entry", "context")}


@dataclass(frozen=True)
class Prompt:
    """A problem as given to the policy, with what its reward needs."""

    id: int  # a hash of stream, text and occurrence: unique within a batch, and the same in every run
    text: str  # the question with the template applied
    tokens: list[int]
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)  # the problem's `metadata`
    unopened: str = field(default="", compare=False)
    """Why the environment could not begin the conversation; all responses to the prompt count as failed."""


@dataclass(frozen=True)
class Misfit:
    """A problem from which no prompt can be made, or whose prompt is too long."""

    text: str  # what is wrong with it
    dropped: bool = False  # because it is too long and `data.overlong` says so


@dataclass
class Counts:
    """Counts of what became of the problems so far."""

    seen: int = 0
    overlong: int = 0  # dropped or truncated
    unusable: int = 0  # generated, but no prompt could be made
    longest: int = 0  # tokens, before dropping or truncation
    notes: list[str] = field(default_factory=list)  # lines about what users may not expect

    def add(self, other: Counts) -> None:
        self.seen, self.overlong = self.seen + other.seen, self.overlong + other.overlong
        self.unusable, self.longest = self.unusable + other.unusable, max(self.longest, other.longest)


Fit = Callable[[Sequence[Problem], Counts], list[Problem | Misfit]]
"""Maps problems to prompts, or misfits in their place, and counts all of them."""


def fit_all(problems: Sequence[Problem], _: Counts) -> list[Problem | Misfit]:
    """Accept all problems that are valid text unchanged, for checks without a tokenizer."""
    return [misfit_of(problem) or problem for problem in problems]


def misfit_of(problem: Problem) -> Misfit | None:
    """What is wrong with a problem that cannot be encoded; None if nothing is."""
    context = json.dumps(problem.context, ensure_ascii=False)
    try:
        for text in (problem.question, problem.answer, problem.demonstration, context):
            text.encode()
    except UnicodeEncodeError as error:
        return Misfit(f"U+{ord(error.object[error.start]):04X} is half of a surrogate pair, which is no text")
    return None


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from numbers and names by SHA-256, so that similar inputs get unrelated seeds."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def is_held_out(question: str, fraction: float) -> bool:
    """Whether a generated problem belongs to the held-out `fraction`: only its text decides, in every stream."""
    return derive_seed("held-out", question) < fraction * 2**63
