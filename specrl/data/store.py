"""Problems that take long to draw, kept in files of the run's folder for later stages, other ranks and restarts.

Some of reasoning-gym's generators take a second for a problem, and of ten problems that are drawn one is held out.
Without these files every rank would draw thousands of them at the start of every stage, and a step's own before each
step. What is drawn is a function of the configuration, the tokenizer and the code alone: a file only ever saves time,
and one that cannot be read or written costs no more than that.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specrl.artifacts import digest, write_text
from specrl.config import Config
from specrl.data.problems import Problem

logger = logging.getLogger(__name__)

SLOW_S = 0.5
"""The least time that problems took which are kept, in seconds; others are drawn again."""
DECIDING = {"generators", "validation_fraction", "template", "system_prompt", "chat_template_kwargs", "overlong"}
"""The fields of `[data]` that decide what generators draw and what is left out of it."""
TUPLE, FRACTION, PAIRS = "$tuple", "$fraction", "$pairs"
"""The keys of objects that stand for what JSON does not know and generators put into entries: tuples, fractions, and
dicts whose keys are no texts."""


class ProblemStore:
    """The kept problems of one configuration, in a file for each stream or step of one."""

    def __init__(self, folder: Path | None, *, reads: bool = True) -> None:
        """Keep problems in a folder; without one, nothing is kept.

        Args:
            reads: Whether to read what is there already; otherwise it is drawn and written anew.
        """
        self._folder, self._reads = folder, reads

    @classmethod
    def of(cls, problems_dir: Path | None, config: Config, tokenizer: Any, *, reads: bool = True) -> ProblemStore:
        """The store for what this configuration and tokenizer draw.

        It keeps no problems of a file, which are read quickly, and none with a tokenizer that has no known state.

        Args:
            problems_dir: `Config.problems_dir`; None for a store that keeps nothing.
        """
        if problems_dir is None or config.data.source != "generators" or not tokenizer.is_fast:
            return cls(None)
        drawn_by = (
            config.data.model_dump(mode="json", include=DECIDING),
            config.seed,
            config.max_prompt_tokens,
            _fingerprint(tokenizer),
            _code(),
        )
        return cls(problems_dir / digest(drawn_by), reads=reads)

    def take(self, name: str, count: int, draw: Callable[[int], list[Problem]]) -> tuple[list[Problem], bool]:
        """The first `count` problems of a stream, and whether drawing them takes long, so that they are kept.

        Args:
            name: The name of the stream, or of a step of one, which becomes that of the file.
            draw: Draws that many problems; a smaller number gives the first ones of a larger number.
        """
        path = self._folder / f"{name}.json" if self._folder is not None else None
        kept = _read(path) if path is not None and self._reads else []
        if len(kept) >= count:
            return kept[:count], True
        started = time.perf_counter()
        found = draw(count)
        is_slow = time.perf_counter() - started >= SLOW_S
        return found, path is not None and is_slow and _write(path, found)


def _fingerprint(tokenizer: Any) -> str:
    state: str = tokenizer.backend_tokenizer.to_str()
    rules = state[state.index('"added_tokens"') :]  # before them is how the last batch was cut and padded
    return digest((rules, tokenizer.chat_template, tokenizer.special_tokens_map))


@cache
def _code() -> str:
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return digest((sources, version("reasoning-gym")))


def _read(path: Path) -> list[Problem]:
    try:
        checksum, _, text = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("%s cannot be read, and its problems are drawn: %s", path, error)
        return []
    if checksum != _checksum(text):
        logger.warning("%s is damaged, and its problems are drawn", path)
        return []
    return [Problem(**{**row, "entry": _original(row["entry"])}) for row in json.loads(text)]


def _write(path: Path, problems: Sequence[Problem]) -> bool:
    """Write problems and return True, or False where that is not possible: then they are drawn each time."""
    try:
        text = json.dumps([{**vars(problem), "entry": _plain(problem.entry)} for problem in problems])
        if [_original(row["entry"]) for row in json.loads(text)] != [problem.entry for problem in problems]:
            raise TypeError("their entries have values that JSON does not keep")
        write_text(path, f"{_checksum(text.encode()).decode()}\n{text}")
    except (OSError, TypeError, ValueError) as error:
        logger.warning("%s cannot be written, and its problems are drawn each time: %s", path, error)
        return False
    return True


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return {TUPLE: _plain(list(value))}
    if isinstance(value, Fraction):
        return {FRACTION: str(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    return {PAIRS: _plain([list(pair) for pair in value.items()])}


def _original(value: Any) -> Any:
    if isinstance(value, list):
        return [_original(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TUPLE}:
        return tuple(_original(value[TUPLE]))
    if value.keys() == {FRACTION}:
        return Fraction(value[FRACTION])
    if value.keys() == {PAIRS}:
        return dict(_original(value[PAIRS]))
    return {key: _original(item) for key, item in value.items()}
