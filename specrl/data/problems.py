"""Problems and the prompts made from them, and deterministic seeds."""

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
        """All that is asked, which tells it from other problems."""
        return json.dumps([self.context, self.question]) if self.context else self.question

    @property
    def metadata(self) -> dict[str, Any]:
        """What a reward may need of it beside prompt and answer."""
        return {name: getattr(self, name) for name in ("question", "generator", "entry", "context")}


@dataclass(frozen=True)
class Prompt:
    """A problem as the policy gets it, with what its reward needs."""

    id: int  # a hash of stream, text and occurrence: unique within a batch, and the same in every run
    text: str  # the question with the template applied
    tokens: list[int]
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)  # the problem's `metadata`
    unopened: str = field(default="", compare=False)
    """Why its environment failed to begin the conversation; all responses to it count as failed."""


@dataclass(frozen=True)
class Misfit:
    """A problem that no prompt can be made of, or whose prompt is too long."""

    text: str  # what is wrong with it
    dropped: bool = False  # because it is too long and `data.overlong` says so


@dataclass
class Counts:
    """What became of the problems that were looked at."""

    seen: int = 0
    overlong: int = 0  # dropped or truncated
    unusable: int = 0  # generated ones that no prompt could be made of
    longest: int = 0  # in tokens, before it was dropped or truncated
    notes: list[str] = field(default_factory=list)  # a line for each thing that a user may not expect

    def add(self, other: Counts) -> None:
        self.seen, self.overlong = self.seen + other.seen, self.overlong + other.overlong
        self.unusable, self.longest = self.unusable + other.unusable, max(self.longest, other.longest)


Fit = Callable[[Sequence[Problem], Counts], list[Problem | Misfit]]
"""Problems -> each as it can be asked, or a misfit in its place; all are counted."""


def fit_all(problems: Sequence[Problem], _: Counts) -> list[Problem | Misfit]:
    """All problems that are text, as they are, for checks that are made without a tokenizer."""
    return [misfit_of(problem) or problem for problem in problems]


def misfit_of(problem: Problem) -> Misfit | None:
    """What is wrong with a problem that cannot be encoded; None if it can."""
    context = json.dumps(problem.context, ensure_ascii=False)
    try:
        for text in (problem.question, problem.answer, problem.demonstration, context):
            text.encode()
    except UnicodeEncodeError as error:
        return Misfit(f"U+{ord(error.object[error.start]):04X} is half of a surrogate pair, which is no text")
    return None


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed made of numbers and names by SHA-256, so that similar inputs have unrelated seeds."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def is_held_out(question: str, fraction: float) -> bool:
    """Whether a generated problem is among the held-out `fraction`: its text alone decides, in every stream."""
    return derive_seed("held-out", question) < fraction * 2**63
