"""Problem generators by name (reasoning-gym's and specrl's own), and mixtures of them."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from random import Random
from typing import Any

from pydantic import ValidationError

from specrl.config import ConfigError, DataConfig, GeneratorConfig
from specrl.data.answers import extract_answer, format_answer
from specrl.data.problems import Fit, Generator, Problem, derive_seed, is_held_out
from specrl.data.scorers.expressions import NotAnAnswerError
from specrl.data.scorers.review import REVIEWED, refuse_unreviewed
from specrl.data.worked_sums import WorkedSums

CHUNK = 64
"""The problems in a reasoning-gym data set: few, because some data sets make all their problems at once."""
MAX_MISSES = 2000
"""The draws in a row without a new problem after which the generators count as exhausted."""


class ReasoningGym:
    """One of reasoning-gym's generators, with its parameters."""

    def __init__(self, name: str, parameters: dict[str, Any]) -> None:
        """Make a generator; reasoning-gym raises various errors where it refuses a parameter."""
        self.name = name
        self.parameters = parameters
        self._failed = 0
        self._scorer = self._dataset(seed=0)

    def problems(self, seed: int) -> Iterator[Problem]:
        """Yield problems without end; they depend on the seed and the parameters alone."""
        chunk = 0
        while True:
            # A data set draws item i from Random(seed + i): chunks' seeds must lie far apart and fit NumPy's 32 bits.
            dataset = self._dataset(derive_seed(seed, chunk) % 2**31)
            for index in range(CHUNK):
                item = self._item(dataset, index)
                if item is None:
                    continue
                answer = str(item["answer"])
                yield Problem(item["question"], answer, " " + format_answer(answer), item)
            chunk += 1

    def score(self, response: str, answer: str, entry: dict[str, Any]) -> float:
        """Reasoning-gym's own score, 0 to 1, of the answer that the response states.

        What the response says reaches the library only if it is the right answer to the letter, or as `REVIEWED` makes
        it safe; 0 is for what is no answer.
        """
        review, stated = REVIEWED[self.name], extract_answer(response)
        try:
            safe = stated if stated == answer else review.guard(stated, entry)
            return float(self._scorer.score_answer(safe, entry))
        except NotAnAnswerError:
            return 0.0
        except review.refusals:
            return 0.0

    def _item(self, dataset: Any, index: int) -> dict[str, Any] | None:
        """An item of a data set; None where the generator fails on it.

        Raises:
            ConfigError: It has failed on `MAX_MISSES` items in a row.
        """
        try:
            item: dict[str, Any] = dataset[index]
        except Exception as error:  # a library's generator that fails on one in a million seeds shall not end a run
            self._failed += 1
            if self._failed == MAX_MISSES:
                raise ConfigError(f"data.generators: {self.name} fails on every item: {error}") from error
            return None
        self._failed = 0
        return item

    def _dataset(self, seed: int) -> Any:
        from reasoning_gym.factory import create_dataset

        return create_dataset(self.name, seed=seed, size=CHUNK, **self.parameters)


def make_generator(config: GeneratorConfig) -> Generator:
    """The generator of one entry of `data.generators`.

    Raises:
        ConfigError: The name or a parameter is unknown, or the generator refuses a value; the line says what is
            allowed.
    """
    return _worked_sums(config) if config.name == "worked_sums" else _reasoning_gym(config)


def _worked_sums(config: GeneratorConfig) -> Generator:
    try:
        return WorkedSums.model_validate(config.parameters)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        reason = f"{key}: {problem['msg'].removeprefix('Value error, ')}".removeprefix(": ")
        raise _refused(config.name, reason, list(WorkedSums.model_fields)) from error


def _reasoning_gym(config: GeneratorConfig) -> Generator:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # one of its dependencies' sources causes them
        from reasoning_gym.factory import DATASETS
    if config.name not in DATASETS:
        names = ["worked_sums", *sorted(DATASETS)]
        close = get_close_matches(config.name, names, n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else f"allowed: {', '.join(names)}"
        raise ConfigError(f"data.generators: unknown generator {config.name!r}; {hint}")
    dataset, parameters = DATASETS[config.name]
    try:
        refuse_unreviewed(config.name, dataset)
    except ValueError as error:
        raise ConfigError(f"data.generators: {config.name} cannot be used: {error}") from error
    fields = dataclasses.fields(parameters)
    allowed = [field.name for field in fields if field.name not in ("seed", "size")]
    unknown = sorted(config.parameters.keys() - set(allowed))
    if unknown:
        raise _refused(config.name, f"unknown parameter {unknown[0]!r}", allowed)
    try:
        return ReasoningGym(config.name, dict(config.parameters))
    except (AssertionError, LookupError, TypeError, ValueError) as error:  # their `validate` methods raise these
        raise _refused(config.name, str(error), allowed) from error


def _refused(name: str, reason: str, allowed: list[str]) -> ConfigError:
    return ConfigError(f"data.generators: {name}: {reason}; parameters: {', '.join(allowed)}")


class GeneratorMixture:
    """Problems drawn from several generators by weight; `is_held_out` decides which of them are held out."""

    def __init__(self, config: DataConfig, seed: int, fit: Fit) -> None:
        """Make the generators of `data.generators`.

        Args:
            fit: What becomes of problems whose prompts are too long.

        Raises:
            ConfigError: There is none, or one of them is unknown or refuses its parameters.
        """
        self.config = config
        self.seed = seed
        self._fit = fit
        self._misfit = ""
        """What was wrong with the last problem that could not be asked."""
        self.generators = [make_generator(generator) for generator in config.generators]
        if not self.generators:
            raise ConfigError("data.generators is empty: name at least one generator")

    def draw(self, stream: str, step: int, count: int, drawn: int) -> list[Problem]:
        """Problems that are distinct as long as the generators have new ones, and then repeats.

        They do not depend on how many were drawn before.

        Raises:
            ConfigError: The generators have only held-out problems.
        """
        found = list(islice(self._distinct(stream, step, held_out=False, repeat=True), count))
        if len(found) < count:
            raise ConfigError(
                f"data.generators gave no training problem in {MAX_MISSES} draws: "
                + self._why_so_few("lower data.validation_fraction")
            )
        return found

    def held_out(self, count: int, patience_s: float = math.inf) -> list[Problem]:
        """The first `count` distinct held-out problems, or those that were found within `patience_s` seconds.

        Raises:
            ConfigError: The generators have fewer.
        """
        deadline = time.monotonic() + patience_s
        problems = list(islice(self._distinct("held-out", 0, held_out=True, repeat=False, until=deadline), count))
        if len(problems) < count and time.monotonic() < deadline:
            raise ConfigError(
                f"data.generators have only {len(problems)} distinct held-out problems of the {count} asked for: "
                + self._why_so_few("ask for fewer, widen the generators' parameters, or raise data.validation_fraction")
            )
        return problems

    def notes(self, count: int) -> list[str]:
        """Nothing: what generators give is known only as it is drawn."""
        return []

    def trains_on(self, question: str) -> bool:
        """False: what generators give is known only as it is drawn."""
        return False

    def _distinct(
        self, stream: str, step: int, held_out: bool, repeat: bool, until: float = math.inf
    ) -> Iterator[Problem]:
        """Yield distinct problems that are held out or not; when there are no new ones, end or start to repeat them.

        Args:
            until: The time of `time.monotonic` at which to end in any case.
        """
        seen: set[str] = set()
        misses = 0
        for candidate in self._candidates(stream, step):
            if time.monotonic() > until:
                return
            problem = self._fitted(candidate)
            if problem is not None and problem.question not in seen:
                wanted = is_held_out(problem.question, self.config.validation_fraction) == held_out
                if wanted:
                    seen.add(problem.question)
                    misses = 0
                    yield problem
                    continue
            misses += 1
            if misses == MAX_MISSES:
                if not (repeat and seen):
                    return
                seen, misses = set(), 0

    def _fitted(self, candidate: Problem) -> Problem | None:
        """A problem as it can be asked; None for one that cannot.

        Raises:
            ConfigError: Its prompt is too long, and `data.overlong` refuses that.
        """
        [found] = self._fit([candidate])
        if isinstance(found, Problem):
            return found
        self._misfit = found.text
        if found.rule == "refuse":
            raise ConfigError(f"data.generators: {self.config.generators[candidate.generator].name}: {found.text}")
        return None

    def _why_so_few(self, advice: str) -> str:
        return f"of one that was left out, {self._misfit}" if self._misfit else advice

    def _candidates(self, stream: str, step: int) -> Iterator[Problem]:
        """Yield problems of all generators by weight without end, held out or not, some more than once."""
        seed = derive_seed(self.seed, stream, step)
        rng = Random(seed)
        weights = [generator.weight for generator in self.config.generators]
        sources = [generator.problems(derive_seed(seed, index)) for index, generator in enumerate(self.generators)]
        while True:
            index = rng.choices(range(len(sources)), weights)[0]
            yield dataclasses.replace(next(sources[index]), generator=index)
