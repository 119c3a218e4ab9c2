"""specrl's own generator: sums with worked steps. Sums of many terms give the response lengths a long tail."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from specrl.config.base import PositiveInt, Section
from specrl.data.problems import Problem

ANSWER = re.compile(r"Answer: (-?\d+)")  # the sum that a response states


class WorkedSums(Section):
    """Sums with worked steps: `Q: 7 + 15 + 4\\nA:` with the answer ` 7 + 15 = 22, 22 + 4 = 26. Answer: 26`."""

    terms: tuple[Annotated[int, Field(ge=2)], ...] = (2, 2, 3, 3, 4, 5, 6, 8, 12)
    """The numbers of terms. A block of as many problems has each number once, in random order, so that batches are of
    similar difficulty and their mean rewards can be compared. Repeat a number to make it more frequent."""
    low: Annotated[int, Field(ge=0)] = 1
    """Smallest term."""
    high: PositiveInt = 20
    """Largest term of the usual range."""
    large_high: PositiveInt = 99
    """Largest term of the wide range."""
    large_share: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Share of the terms drawn from the wide range."""

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        if not self.terms or self.low > min(self.high, self.large_high):
            raise ValueError(
                f"terms must not be empty, and low must not exceed high and large_high; low = {self.low}, "
                f"high = {self.high}, large_high = {self.large_high}"
            )
        return self

    def problems(self, seed: int) -> Iterator[Problem]:
        """Yield endless sums, a pure function of the seed and the parameters."""
        rng = Random(seed)
        while True:
            for size in rng.sample(self.terms, len(self.terms)):
                highest = (self.large_high if rng.random() < self.large_share else self.high for _ in range(size))
                yield worked_sum([rng.randint(self.low, high) for high in highest])

    def score(self, response: str, answer: str, entry: dict[str, Any]) -> float:
        """1 if the response's last `Answer: N` states the sum, else 0."""
        stated = ANSWER.findall(response)
        return float(bool(stated) and stated[-1].lstrip("0") == answer.lstrip("0"))


def worked_sum(terms: list[int]) -> Problem:
    """The problem of adding two or more terms one after the other."""
    total, steps = terms[0], []
    for term in terms[1:]:
        steps.append(f"{total} + {term} = {total + term}")
        total += term
    question = f"Q: {' + '.join(map(str, terms))}\nA:"
    return Problem(question, str(total), f" {', '.join(steps)}. Answer: {total}", {"terms": terms})
