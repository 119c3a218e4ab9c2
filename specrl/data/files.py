"""Problems from files with prompt and answer columns, and requests from files of chats."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from specrl.config import Config, ConfigError
from specrl.config.base import prefixed
from specrl.data.answers import format_answer
from specrl.data.formats.messages import CHATS, TOOLS, Message, read_messages, tools_of
from specrl.data.formats.places import files_of
from specrl.data.formats.rows import find, read_rows
from specrl.data.problems import Counts, Fit, Misfit, Problem, derive_seed

ALIASES = {"prompt": CHATS, "answer": ("reward_model.ground_truth",)}
"""Columns tried if a default one is missing: chats, and verl's layout."""
COMPARING = ("math_verify", "exact_match")  # rewards that no response can earn if the answer is empty
TRUTH = "ground_truth"  # the answer in verl's `reward_model`
Request = str | list[Message]


def read_problems(place: Path, config: Config, fit: Fit, counts: Counts) -> list[Problem]:
    """Read the rows of a place's files as problems, in the files' order; answers of any type become text."""
    data, environment = config.data, config.environment.name
    columns = (data.prompt_column, data.answer_column)
    judges = [part.name for part in data.reward] if environment is None else [environment]
    others, compared = any(":" in name for name in judges), any(name in COMPARING for name in judges)
    named = [*columns, *(name for column in columns for name in ALIASES.get(column, ())), "system", TOOLS]
    wanted = () if others else named  # the user's own functions get all columns
    found = [(where, row) for path in _files(place) for where, row in read_rows(path, wanted)]
    if not found:
        raise ConfigError(f"data file {place} is empty")
    if data.template != "chat" and (asked := next((where for where, row in found if tools_of(row)), None)):
        raise ConfigError(f'{asked}: only a chat template takes tools: data.template = "chat", or a file without tools')
    fitted = fit([_problem(where, row, columns, others=others, compared=compared) for where, row in found], counts)
    misfits = [(where, one) for (where, _), one in zip(found, fitted, strict=True) if isinstance(one, Misfit)]
    for where, misfit in misfits:
        if not misfit.dropped or len(misfits) == len(found):  # the latter if all prompts are too long
            raise ConfigError(f"{where}: {misfit.text}")
    return [one for one in fitted if isinstance(one, Problem)]


def read_requests(place: Path) -> list[Request]:
    return [request for _, request in placed_requests([place])]


def placed_requests(places: Sequence[Path]) -> list[tuple[str, Request]]:
    """The requests in files, row by row, with the rows' places: a text, or a chat up to its last request.

    A row has a `prompt`, or `messages` (or `conversations`) whose final assistant messages are dropped.
    """
    found = [(place, _request(place, row)) for one in places for path in _files(one) for place, row in read_rows(path)]
    if not found:
        raise ConfigError(f"data file {', '.join(map(str, places))} is empty")
    return found


def _files(place: Path) -> list[Path]:
    if not (paths := files_of([place])):
        wrong = "is a folder without data files" if place.is_dir() else "does not exist"
        raise ConfigError(f"data file {place} {wrong}")
    return paths


def _request(place: str, row: dict[str, Any]) -> Request:
    chat = next((row[name] for name in CHATS if row.get(name) is not None), None)
    prompt = row.get("prompt")
    with prefixed(f"{place}: "):
        messages = read_messages(prompt if chat is None else chat, row)
    if messages is not None:
        return [*tools_of(row), *messages]
    if chat is not None:
        raise ConfigError(f"{place}: messages must be a list of objects with role and content")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{place} must have messages, a list, or prompt, a text that is not empty")
    return [*tools, {"role": "user", "content": prompt}] if (tools := tools_of(row)) else prompt


def _problem(place: str, row: dict[str, Any], columns: tuple[str, str], *, others: bool, compared: bool) -> Problem:
    keys = ("prompt_column", "answer_column")
    prompt, answer = (
        find(row, name, place, key, ALIASES.get(name, ())) for name, key in zip(columns, keys, strict=True)
    )
    context: list[Message] = []
    with prefixed(f"{place}: "):
        messages = read_messages(prompt, row)
    if messages is not None:
        *context, last = messages
        prompt = last["content"]
        if last["role"] != "user":
            raise ConfigError(f"{place}: the last message before the answer is of {last['role']}, not of the user")
    if not isinstance(prompt, str) or not prompt.strip():
        given = type(prompt).__name__ if not isinstance(prompt, str) else "empty"
        raise ConfigError(f"{place}: {columns[0]} must be text that is not empty, and is {given}")
    if isinstance(answer, dict) and TRUTH in answer:
        answer = answer[TRUTH]
    if "<image>" in prompt and row.keys() & {"images", "image"}:
        raise ConfigError(f"{place}: {columns[0]} asks about an image; only text can be asked")
    not_finite = isinstance(answer, float) and not math.isfinite(answer)
    empty = compared and isinstance(answer, str) and not answer.strip()
    if answer is None or not_finite or empty or isinstance(answer, bytes):
        why = f"{answer!r:.40}{', which no response can equal' if empty else ''}"
        raise ConfigError(
            f"{place}: {columns[1]} must be text that is not empty, a finite number, true or false, a list or an "
            f"object, and is {why}"
        )
    text = json.dumps(answer, ensure_ascii=False, default=str) if isinstance(answer, list | dict) else str(answer)
    rest = {name: value for name, value in row.items() if name not in columns} if others else {}
    return Problem(prompt, text, " " + format_answer(text), rest, context=[*tools_of(row), *context])


class FileProblems:
    """Problems from files, drawn in shuffled epochs; held out are other files, or the last rows of each set."""

    def __init__(self, config: Config, fit: Fit, counts: Counts) -> None:
        data, self.seed = config.data, config.seed
        assert data.path is not None
        self._names = [", ".join(map(str, places)) for places in (data.path, data.validation_path) if places]
        sets = [read_problems(place, config, fit, counts) for place in data.path]
        held_out = [row for place in data.validation_path or () for row in read_problems(place, config, fit, counts)]
        if data.validation_path is None:
            cuts = [round(len(rows) * data.validation_fraction) for rows in sets]
            cuts[-1] = cuts[-1] if any(cuts) else 1
            held_out = [row for rows, cut in zip(sets, cuts, strict=True) for row in rows[len(rows) - cut :]]
            sets = [rows[: len(rows) - cut] for rows, cut in zip(sets, cuts, strict=True)]
        reserved = {row.identity: row for row in held_out}
        self._held_out = list(reserved.values())
        num_rows = sum(map(len, sets))
        sets = [[row for row in rows if row.identity not in reserved] for rows in sets]
        self._training = [row for rows in sets for row in rows]
        self._num_reserved = num_rows - len(self._training)
        self.questions = {row.question for row in self._training}
        if not all(sets) if data.weights else not self._training:
            raise ConfigError(
                f"data file {self._names[0]} has no row left to train on beside the held-out ones: none asks "
                f"something else than the {len(reserved)} of them do; add rows, or hold out fewer or others"
            )
        self._sizes = [len(rows) for rows in sets]
        whole = sum(data.weights)
        drawn = [max(1, round(sum(self._sizes) * weight / whole)) for weight in data.weights]
        self._drawn = drawn or self._sizes

    def notes(self, count: int) -> list[str]:
        """Lines about what users may not expect of these rows in steps of `count` prompts."""
        path, lines = self._names[0], []
        if self._num_reserved:
            lines.append(f"data file {path}: rows left out because a held-out one asks the same: {self._num_reserved}")
        repeated, conflicting = self._count_repeats()
        if repeated:
            others = f", with another answer: {conflicting}" if conflicting else ""
            lines.append(f"data file {path}: training rows that repeat an earlier prompt: {repeated}{others}")
        if len(self._training) < count:
            lines.append(
                f"data file {path} has {len(self._training)} rows to train on, fewer than train.prompts_per_step = "
                f"{count}: a step asks some prompts more than once"
            )
        return lines

    def _count_repeats(self) -> tuple[int, int]:
        answers: dict[str, str] = {}
        repeated = [(row.answer, answers.setdefault(row.identity, row.answer)) for row in self._training]
        return len(repeated) - len(answers), sum(own != first for own, first in repeated)

    def draw(self, stream: str, first: int, count: int) -> list[Problem]:
        """Draw rows `first` to `first + count` of the stream's epochs, each shuffled anew.

        If sets have weights, an epoch repeats or omits rows of each accordingly.
        """
        size = sum(self._drawn)
        positions = range(first, first + count)
        return [self._training[self._order(stream, position // size)[position % size]] for position in positions]

    def held_out(self, count: int, patience_s: float = math.inf) -> list[Problem]:
        """Return the first `count` distinct held-out rows."""
        if count > len(self._held_out):
            raise ConfigError(
                f"{self._names[-1]} has only {len(self._held_out)} distinct held-out rows of the {count} asked for: "
                "ask for fewer, raise data.validation_fraction, or set data.validation_path to a larger file"
            )
        return self._held_out[:count]

    @lru_cache(maxsize=4)  # noqa: B019 - lives as long as the run anyway
    def _order(self, stream: str, epoch: int) -> list[int]:
        random, order, first = Random(derive_seed(self.seed, stream, epoch)), [], 0
        for size, drawn in zip(self._sizes, self._drawn, strict=True):
            rows = range(first, first + size)
            order += [*rows] * (drawn // max(size, 1)) + random.sample(rows, drawn % max(size, 1))
            first += size
        random.shuffle(order)
        return order
