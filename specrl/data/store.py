"""Problems that took long to draw, in files of the run's folder, so that no stage, rank or restart draws them again.

Some of reasoning-gym's generators take a second for a problem, and of ten problems that are drawn one is held out.
Without these files every rank would draw thousands of them at the start of every stage, and a step's own before each
step. What is drawn is a function of the configuration and the tokenizer alone: a file only ever saves time.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from specrl.artifacts import atomic_path, digest
from specrl.config import Config
from specrl.data.problems import Problem

logger = logging.getLogger(__name__)

SLOW_S = 0.5
"""The least time that problems took which are kept, in seconds; others are drawn again."""
PROBLEM_SCHEMA = pa.schema(
    [
        pa.field("question", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("demonstration", pa.string(), nullable=False),
        pa.field("generator", pa.int32(), nullable=False),
        pa.field("entry", pa.binary(), nullable=False),  # pickled: generators put objects of any kind into it
    ],
    metadata={"specrl.schema": "problem", "specrl.schema_version": "1"},
)


class ProblemStore:
    """The kept problems of one configuration, in a file for each stream or step of one."""

    def __init__(self, folder: Path | None) -> None:
        """Take the problems that are in a folder; without one, nothing is kept."""
        self._folder = folder

    @classmethod
    def of(cls, problems_dir: Path | None, config: Config, tokenizer: Any) -> ProblemStore:
        """Return the store for what this configuration and tokenizer draw.

        It keeps no problems of a file, which are read quickly, and none with a tokenizer that has no known state.

        Args:
            problems_dir: `Config.problems_dir`; None for a store that keeps nothing.
        """
        if problems_dir is None or config.data.source != "generators" or not tokenizer.is_fast:
            return cls(None)
        drawn_by = (
            config.data.model_dump(mode="json"),
            config.seed,
            config.max_prompt_tokens,
            _fingerprint(tokenizer),
            version("reasoning-gym"),
        )
        return cls(problems_dir / digest(drawn_by))

    def take(
        self, name: str, count: int, draw: Callable[[int], list[Problem]], *, anew: bool = False
    ) -> tuple[list[Problem], bool]:
        """Return the first `count` problems of a stream, and whether they are kept, so that they took or take long.

        Args:
            name: The name of the stream, or of a step of one, which becomes that of the file.
            draw: Draws that many problems; a smaller number gives the first ones of a larger number.
            anew: Whether to draw them even if they are kept.
        """
        path = self._folder / f"{name}.arrow" if self._folder is not None else None
        kept = _read(path) if path is not None and not anew else []
        if len(kept) >= count:
            return kept[:count], True
        started = time.perf_counter()
        found = draw(count)
        is_slow = time.perf_counter() - started >= SLOW_S
        if path is not None and is_slow:
            _write(path, found)
        return found, path is not None and is_slow


def _fingerprint(tokenizer: Any) -> str:
    """Return a digest of how a tokenizer makes tokens of a text and of a conversation."""
    state: str = tokenizer.backend_tokenizer.to_str()
    rules = state[state.index('"added_tokens"') :]  # before them is how the last batch was cut and padded
    return hashlib.sha256(f"{rules}{tokenizer.chat_template}".encode()).hexdigest()


def _read(path: Path) -> list[Problem]:
    """Return the problems of a file; none where there is no such file or it cannot be read."""
    try:
        with pa.memory_map(str(path)) as source:
            rows = pa.ipc.open_file(source).read_all().to_pylist()
    except FileNotFoundError:
        return []
    except (OSError, pa.ArrowInvalid) as error:
        logger.warning("%s cannot be read, and its problems are drawn: %s", path, error)
        return []
    return [Problem(**{**row, "entry": pickle.loads(row["entry"])}) for row in rows]


def _write(path: Path, problems: Sequence[Problem]) -> None:
    """Write problems; where that is not possible they are drawn again when they are next asked for."""
    try:
        rows = [{**vars(problem), "entry": pickle.dumps(problem.entry)} for problem in problems]
        table = pa.Table.from_pylist(rows, PROBLEM_SCHEMA)
        with (
            atomic_path(path) as temporary,
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_file(sink, PROBLEM_SCHEMA) as writer,
        ):
            writer.write_table(table)
    except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
        logger.warning("%s cannot be written, and its problems are drawn each time: %s", path, error)
