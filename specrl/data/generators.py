"""Problem generators by name: those of reasoning-gym, and specrl's own."""

from __future__ import annotations

import dataclasses
import math
import random
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from numbers import Integral
from typing import Any

from pydantic import ValidationError

from specrl.config import ConfigError, GeneratorConfig
from specrl.config.errors import explain
from specrl.data.answers import extract_answer, format_answer
from specrl.data.problems import Problem, derive_seed
from specrl.data.scorers.expressions import NotAnAnswerError
from specrl.data.scorers.review import REVIEWED, refuse_unreviewed
from specrl.data.worked_sums import WorkedSums

CHUNK = 64  # problems per reasoning-gym data set, some of which generate all of them at once
MAX_MISSES = 2000  # draws without a new problem after which generators count as exhausted


class ReasoningGym:
    """A reasoning-gym generator with its parameters, with the interface of `WorkedSums`."""

    def __init__(self, name: str, parameters: dict[str, Any]) -> None:
        self.name = name
        self.parameters = parameters
        self._failed = 0
        self._scorer = self._dataset(seed=0)

    def problems(self, seed: int) -> Iterator[Problem]:
        chunk = 0
        while True:
            # A data set draws item i from Random(seed + i): chunks' seeds must lie far apart and fit NumPy's 32 bits.
            dataset = self._dataset(derive_seed(seed, chunk) % 2**31)
            for index in range(CHUNK):
                item = self._item(dataset, index)
                if item is None:
                    continue
                answer = str(item["answer"])
                yield Problem(item["question"], answer, " " + format_answer(answer), plain(item))
            chunk += 1

    def score(self, response: str, answer: str, entry: dict[str, Any]) -> float:
        """Score the stated answer from 0 to 1 with reasoning-gym's own scorer.

        The library sees the answer only if it equals the right one to the letter, or as `REVIEWED` makes it safe.
        """
        review, stated = REVIEWED[self.name], extract_answer(response)
        no_answer: tuple[type[Exception], ...] = (NotAnAnswerError, *review.refusals)
        try:
            safe = stated if stated == answer else review.guard(stated, entry)
            return float(self._scorer.score_answer(safe, entry))
        except no_answer:
            return 0.0

    def _item(self, dataset: Any, index: int) -> dict[str, Any] | None:
        state = random.getstate()
        random.seed(dataset.seed + index)  # `list_functions` and `codeio` also draw from Python's global generator
        try:
            item: dict[str, Any] = dataset[index]
        except Exception as error:  # a generator that fails on one seed in a million must not end a run
            self._failed += 1
            if self._failed == MAX_MISSES:
                raise ConfigError(f"data.generators: {self.name} fails on every item: {error}") from error
            return None
        finally:
            random.setstate(state)
        self._failed = 0
        return item

    def _dataset(self, seed: int) -> Any:
        from reasoning_gym.factory import create_dataset

        return create_dataset(self.name, seed=seed, size=CHUNK, **self.parameters)


def make_generator(config: GeneratorConfig) -> ReasoningGym | WorkedSums:
    if config.name != "worked_sums":
        return _reasoning_gym(config)
    try:
        return WorkedSums.model_validate(config.parameters)
    except ValidationError as error:
        reason = explain(error, WorkedSums).splitlines()[0]
        raise _refused(config.name, reason, list(WorkedSums.model_fields)) from error


def _reasoning_gym(config: GeneratorConfig) -> ReasoningGym:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # caused by the source of a dependency
        from reasoning_gym.factory import DATASETS
    if config.name not in DATASETS:
        names = ["worked_sums", *sorted(DATASETS)]
        close = get_close_matches(config.name, names, n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else f"allowed: {', '.join(names)}"
        raise ConfigError(f"data.generators: unknown generator {config.name!r}; {hint}")
    _, parameters = DATASETS[config.name]
    refuse_unreviewed(config.name)
    allowed = [field.name for field in dataclasses.fields(parameters) if field.name not in ("seed", "size")]
    if unknown := sorted(config.parameters.keys() - set(allowed)):
        raise _refused(config.name, f"unknown parameter {unknown[0]!r}", allowed)
    try:
        return ReasoningGym(config.name, dict(config.parameters))
    except (AssertionError, LookupError, TypeError, ValueError) as error:  # their `validate` methods raise these
        raise _refused(config.name, str(error), allowed) from error


def _refused(name: str, reason: str, allowed: list[str]) -> ConfigError:
    return ConfigError(f"data.generators: {name}: {reason}; parameters: {', '.join(allowed)}")


def plain(value: Any) -> Any:
    """Convert a value for a Python literal: NumPy's numbers become Python's, anything unknown becomes text."""
    match value:
        case dict():
            return {plain(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return (list if isinstance(value, list) else tuple)(map(plain, value))
        case None | bool():
            return value
        case Integral():  # NumPy's are no subclasses of int
            return int(value)
        case float() if math.isfinite(value):
            return float(value)
    return str(value)
