"""Problems from a JSONL or Parquet file with a prompt and an answer column."""

from __future__ import annotations

import codecs
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from textwrap import shorten
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specrl.config import ConfigError, DataConfig
from specrl.data.answers import format_answer
from specrl.data.problems import Fit, Misfit, Problem, derive_seed

LONGEST_LINE = 16 * 2**20
"""The bytes of the longest line of a JSONL file: an answer to a file that is no JSONL."""
ROLES = {"human": "user", "gpt": "assistant"}
"""The names of roles in the chats of ShareGPT, and those that chat templates know."""


def read_problems(path: Path, config: DataConfig, fit: Fit) -> list[Problem]:
    """Return the rows of a file as problems, in the file's order; answers of any type become text.

    Raises:
        ConfigError: The file does not exist, has another format or lacks a column, no prompt can be made of a row, or
            all prompts are too long. The line names the file and the first such row.
    """
    if not path.is_file():
        raise ConfigError(f"data file {path} does not exist")
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"data file {path}: the name must end in .jsonl or .parquet")
    columns = (config.prompt_column, config.answer_column)
    try:
        read = _read_parquet if path.suffix == ".parquet" else _read_jsonl
        rows = list(read(path, columns, others=":" in config.reward))
    except OSError as error:
        raise ConfigError(f"data file {path} cannot be read: {error.strerror or error}") from error
    if not rows:
        raise ConfigError(f"data file {path} is empty")
    fitted = fit([row.problem(columns) for row in rows])
    misfits = [(row.place, found) for row, found in zip(rows, fitted, strict=True) if isinstance(found, Misfit)]
    for place, misfit in misfits:
        if misfit.rule != "drop" or len(misfits) == len(rows):  # the latter where all prompts are too long
            raise ConfigError(f"{place}: {misfit.text}")
    return [found for found in fitted if isinstance(found, Problem)]


def read_requests(path: Path) -> list[str | list[dict[str, str]]]:
    """Return what a file asks, row by row: a text, or the messages of a chat up to its last request.

    A row has `messages` (or `conversations`), of which the assistant's last ones are left out, or the text `prompt`.

    Raises:
        ConfigError: The file does not exist or has another format, or a row asks nothing.
    """
    if not path.is_file() or path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"drafter.data = {path}: it must be a .jsonl or .parquet file that exists")
    if path.suffix == ".parquet":
        try:
            rows = pq.read_table(path).to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"data file {path} is not readable as Parquet: {' '.join(str(error).split())}") from error
        places = [f"data file {path}, row {number}" for number in range(1, len(rows) + 1)]
    else:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
        parsed = [
            (place := f"data file {path}, line {number}", _parse_line(place, line))
            for number, line in enumerate(lines, 1)
        ]
        places, rows = [place for place, row in parsed if row], [row for _, row in parsed if row]
    if not rows:
        raise ConfigError(f"data file {path} is empty")
    return [_request(place, row) for place, row in zip(places, rows, strict=True)]


def _request(place: str, row: dict[str, Any]) -> str | list[dict[str, str]]:
    chat = row.get("messages") or row.get("conversations")
    if chat is None:
        text = row.get("prompt")
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{place} must have messages, a list, or prompt, a text that is not empty")
        return text
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        raise ConfigError(f"{place}: messages must be a list of objects with role and content")
    messages = [
        {
            "role": ROLES.get(role := str(message.get("role") or message.get("from")), role),
            "content": str(message.get("content") or message.get("value") or ""),
        }
        for message in chat
    ]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ConfigError(f"{place}: messages has no request before the assistant's words")
    return messages


@dataclass(frozen=True)
class _Row:
    place: str
    """The file and the row's number in it, from 1."""
    prompt: Any
    answer: Any
    others: dict[str, Any]
    """The other columns, for a reward of the user's own."""

    def problem(self, columns: tuple[str, str]) -> Problem:
        """Return the row as a problem.

        Raises:
            ConfigError: The prompt is no text, or the answer is missing or no text either.
        """
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            given = type(self.prompt).__name__ if not isinstance(self.prompt, str) else "empty"
            raise ConfigError(f"{self.place}: {columns[0]} must be text that is not empty, and is {given}")
        if self.answer is None or self.answer != self.answer or isinstance(self.answer, bytes):
            raise ConfigError(
                f"{self.place}: {columns[1]} must be text, a number, true or false, a list or an object, and is "
                f"{self.answer!r:.40}"
            )
        structured = isinstance(self.answer, list | dict)
        answer = json.dumps(self.answer, ensure_ascii=False, default=str) if structured else str(self.answer)
        return Problem(self.prompt, answer, " " + format_answer(answer), self.others)


def _read_parquet(path: Path, columns: tuple[str, str], *, others: bool) -> list[_Row]:
    try:
        _require(f"data file {path}", columns, pq.read_schema(path).names)
        rows = pq.read_table(path, columns=None if others else list(dict.fromkeys(columns))).to_pylist()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"data file {path} is not readable as Parquet: {reason}") from error
    return [_row(f"data file {path}, row {number}", row, columns, others) for number, row in enumerate(rows, 1)]


def _read_jsonl(path: Path, columns: tuple[str, str], *, others: bool) -> Iterator[_Row]:
    for place, row in read_objects(path):
        _require(place, columns, list(row))
        yield _row(place, row, columns, others)


def _row(place: str, row: dict[str, Any], columns: tuple[str, str], others: bool) -> _Row:
    rest = {name: value for name, value in row.items() if name not in columns} if others else {}
    return _Row(place, row[columns[0]], row[columns[1]], rest)


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object on each line of a JSONL file, with the file and the line's number in words.

    Raises:
        ConfigError: A line is too long, not UTF-8, or no JSON object.
    """
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                return
            place = f"data file {path}, line {number}"
            if len(line) > LONGEST_LINE:
                raise ConfigError(f"{place} is longer than {LONGEST_LINE // 2**20} MiB; a line must be one JSON object")
            row = _parse_line(place, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
            if row is not None:
                yield place, row


def _parse_line(place: str, line: bytes) -> dict[str, Any] | None:
    """Return the object on a line; None where the line is blank."""
    if not line.strip():
        return None
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place} is not UTF-8 text ({error.reason} at its byte {error.start}); save the file as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place} must be a JSON object")
    return row


def _require(place: str, columns: tuple[str, str], present: list[str]) -> None:
    """Raise ConfigError unless the prompt column and the answer column are present."""
    for column, key in zip(columns, ("prompt_column", "answer_column"), strict=True):
        if column not in present:
            names = shorten(", ".join(present), 200) or "none"
            raise ConfigError(f"{place} has no column {column!r} (data.{key}); it has {names}")


class FileProblems:
    """The problems of a file, drawn in shuffled epochs; held-out rows are a file of their own, or the last rows."""

    def __init__(self, config: DataConfig, seed: int, fit: Fit) -> None:
        """Read the file or files of `data.path` and `data.validation_path`.

        Args:
            fit: What becomes of problems whose prompts are too long.

        Raises:
            ConfigError: A file cannot be read, has a row that no prompt can be made of, or all rows are held out.
        """
        assert config.path is not None
        self.seed = seed
        self._paths = [path for path in (config.path, config.validation_path) if path is not None]
        problems = read_problems(config.path, config, fit)
        if config.validation_path is not None:
            self._held_out = read_problems(config.validation_path, config, fit)
        else:
            cut = len(problems) - max(1, round(len(problems) * config.validation_fraction))
            problems, self._held_out = problems[:cut], problems[cut:]
        self._held_out = list({problem.question: problem for problem in self._held_out}.values())
        reserved = {problem.question for problem in self._held_out}
        self._training = [problem for problem in problems if problem.question not in reserved]
        self._questions = {problem.question for problem in self._training}
        if not self._training:
            raise ConfigError(f"data file {config.path} has no row left to train on beside the held-out ones")

    def notes(self, count: int) -> list[str]:
        """Return a line for each thing about the rows that a user may not expect.

        Args:
            count: The number of prompts of a step.
        """
        path, lines = self._paths[0], []
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

    def trains_on(self, question: str) -> bool:
        """Return whether a training row asks this question."""
        return question in self._questions

    def _count_repeats(self) -> tuple[int, int]:
        """Return how many training rows repeat the prompt of an earlier one, and how many of these its answer not."""
        answers: dict[str, str] = {}
        repeated = [(row.answer, answers.setdefault(row.question, row.answer)) for row in self._training]
        return len(repeated) - len(answers), sum(own != first for own, first in repeated)

    def draw(self, stream: str, step: int, count: int, drawn: int) -> list[Problem]:
        """Return rows `drawn` to `drawn + count` of the stream's epochs, each of which is shuffled anew."""
        size = len(self._training)
        positions = range(drawn, drawn + count)
        return [self._training[self._order(stream, position // size)[position % size]] for position in positions]

    def held_out(self, count: int, patience_s: float = math.inf) -> list[Problem]:
        """Return the first `count` distinct held-out rows, which takes no time.

        Raises:
            ConfigError: There are fewer.
        """
        if count > len(self._held_out):
            raise ConfigError(
                f"{self._paths[-1]} has only {len(self._held_out)} distinct held-out rows of the {count} asked for: "
                "ask for fewer, raise data.validation_fraction, or set data.validation_path to a larger file"
            )
        return self._held_out[:count]

    @lru_cache(maxsize=4)  # noqa: B019 - lives as long as the run anyway
    def _order(self, stream: str, epoch: int) -> list[int]:
        """Return the order of the training rows in one epoch of a stream."""
        order = list(range(len(self._training)))
        Random(derive_seed(self.seed, stream, epoch)).shuffle(order)
        return order
