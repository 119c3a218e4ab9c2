"""Problems from a JSONL or Parquet file with a prompt and an answer column."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specrl.config import ConfigError, DataConfig
from specrl.data.answers import format_answer
from specrl.data.problems import Problem, derive_seed


def read_problems(path: Path, prompt_column: str, answer_column: str) -> list[Problem]:
    """Return every row of a file as a problem, in the file's order; answers of any type become text.

    Raises:
        ConfigError: The file does not exist, has another format, lacks a column, or has an unreadable line or an empty
            value.
    """
    if not path.is_file():
        raise ConfigError(f"data file {path} does not exist")
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"data file {path}: the name must end in .jsonl or .parquet")
    columns = (prompt_column, answer_column)
    rows = _read_parquet(path, columns) if path.suffix == ".parquet" else _read_jsonl(path, columns)
    if not rows:
        raise ConfigError(f"data file {path} is empty")
    for number, (prompt, answer) in enumerate(rows, 1):
        if not isinstance(prompt, str) or not prompt.strip() or answer is None:
            raise ConfigError(
                f"data file {path}, row {number}: {prompt_column} must be text and {answer_column} not null"
            )
    return [Problem(prompt, str(answer), " " + format_answer(str(answer))) for prompt, answer in rows]


def _read_parquet(path: Path, columns: tuple[str, str]) -> list[tuple[Any, Any]]:
    try:
        names = pq.read_schema(path).names
        _require(path, columns, names)
        table = pq.read_table(path, columns=list(columns))
    except pa.ArrowException as error:
        raise ConfigError(f"data file {path} is not readable as Parquet: {error}") from error
    return list(zip(*(table.column(column).to_pylist() for column in columns), strict=True))


def _read_jsonl(path: Path, columns: tuple[str, str]) -> list[tuple[Any, Any]]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"data file {path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"data file {path}, line {number} must be a JSON object")
            _require(path, columns, list(row))
            rows.append((row[columns[0]], row[columns[1]]))
    return rows


def _require(path: Path, columns: tuple[str, str], present: list[str]) -> None:
    """Raise ConfigError unless the prompt column and the answer column are present."""
    for column, key in zip(columns, ("prompt_column", "answer_column"), strict=True):
        if column not in present:
            raise ConfigError(f"data file {path} has no column {column!r} (data.{key}); it has {', '.join(present)}")


class FileProblems:
    """The problems of a file, drawn in shuffled epochs; held-out rows are a file of their own, or the last rows."""

    def __init__(self, config: DataConfig, seed: int) -> None:
        """Read the file or files of `data.path` and `data.validation_path`.

        Raises:
            ConfigError: A file cannot be read, or all rows are held out.
        """
        assert config.path is not None
        self.seed = seed
        self._paths = [path for path in (config.path, config.validation_path) if path is not None]
        problems = read_problems(config.path, config.prompt_column, config.answer_column)
        if config.validation_path is not None:
            self._held_out = read_problems(config.validation_path, config.prompt_column, config.answer_column)
        else:
            cut = len(problems) - max(1, round(len(problems) * config.validation_fraction))
            problems, self._held_out = problems[:cut], problems[cut:]
        self._held_out = list({problem.question: problem for problem in self._held_out}.values())
        reserved = {problem.question for problem in self._held_out}
        self._training = [problem for problem in problems if problem.question not in reserved]
        if not self._training:
            raise ConfigError(f"data file {config.path} has no row left to train on beside the held-out ones")

    def draw(self, stream: str, step: int, count: int) -> list[Problem]:
        """Return rows `step * count` to `(step + 1) * count` of the stream's epochs, each of which is shuffled anew."""
        size = len(self._training)
        positions = range(step * count, (step + 1) * count)
        return [self._training[self._order(stream, position // size)[position % size]] for position in positions]

    def held_out(self, count: int) -> list[Problem]:
        """Return the first `count` distinct held-out rows.

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
