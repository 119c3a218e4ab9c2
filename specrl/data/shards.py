"""Mixtures of generators, drawn in shards: small Arrow files, each a pure function of seed, stream and shard number.

A missing or unreadable shard is drawn again, with the same contents.
"""

from __future__ import annotations

import ast
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from random import Random

import pyarrow as pa

from specrl.config import ConfigError, DataConfig
from specrl.data.generators import MAX_MISSES, make_generator
from specrl.data.problems import Counts, Fit, Misfit, Problem, derive_seed, is_held_out
from specrl.schemas import read_table, write_table

logger = logging.getLogger(__name__)

HELD_OUT = "held-out"  # the stream whose problems appear in no other
FRUITLESS = 12  # shards without a new held-out problem after which the generators count as exhausted
SHARD, HELD_OUT_SHARD = 64, 16
"""Problems per shard: fewer for held-out problems, most draws of which are discarded, so that all cores have work."""
SCHEMA = pa.schema(
    [pa.field(name, pa.string(), nullable=False) for name in ("question", "answer", "demonstration", "entry")]
    + [pa.field("generator", pa.int32(), nullable=False)]
)
"""The fields of `Problem`; `entry` is a Python literal, because JSON has no tuples."""


class GeneratorMixture:
    """Problems drawn from several generators by weight; `is_held_out` decides which of them are held out."""

    def __init__(self, config: DataConfig, seed: int, fit: Fit, counts: Counts, folder: Path | None) -> None:
        """Without a `folder` of shards, problems are drawn every time, and only as many as requested."""
        self.config = config
        self.seed = seed
        self._fit, self._counts, self._folder = fit, counts, folder
        self._misfit = ""  # what was wrong with the last misfit
        self.generators = [make_generator(generator) for generator in config.generators]
        if not self.generators:
            raise ConfigError("data.generators is empty: name at least one generator")

    def draw(self, stream: str, first: int, count: int) -> list[Problem]:
        """Draw problems, distinct within a shard until the generators are exhausted, then repeated."""
        found: list[Problem] = []
        for number in self.shards(stream, first, count):
            place = first + len(found) - number * SHARD
            shard = list(islice(self._shard(stream, number), place, place + count - len(found)))
            if not shard:
                raise ConfigError(
                    f"data.generators gave no training problem in {MAX_MISSES} draws: "
                    + self._why_so_few("lower data.validation_fraction")
                )
            found += shard
        return found

    def held_out(self, count: int, patience_s: float = math.inf) -> list[Problem]:
        """The first `count` distinct held-out problems, or those found within `patience_s` seconds."""
        deadline, found = time.monotonic() + patience_s, dict[str, Problem]()
        number = fruitless = 0
        while fruitless < FRUITLESS and time.monotonic() < deadline:
            before, size = len(found), 0
            for problem in self._shard(HELD_OUT, number, deadline):
                found.setdefault(problem.question, problem)
                size += 1
                if len(found) == count:
                    return list(found.values())
            number, fruitless = number + 1, fruitless + 1 if len(found) == before else 0
            if size < HELD_OUT_SHARD:  # there are no more
                break
        if time.monotonic() < deadline:
            raise ConfigError(
                f"data.generators have only {len(found)} distinct held-out problems of the {count} asked for: "
                + self._why_so_few("ask for fewer, widen the generators' parameters, or raise data.validation_fraction")
            )
        return list(found.values())

    def shards(self, stream: str, first: int, count: int) -> range:
        """The numbers of the shards that hold problems `first` to `first + count` of a stream."""
        size = _size(stream)
        return range(first // size, -(-(first + count) // size) if count else first // size)

    def has(self, stream: str, number: int) -> bool:
        return self._path(stream, number).exists()

    def keep(self, stream: str, number: int) -> None:
        if not self.has(stream, number):
            self._shard(stream, number)

    def _path(self, stream: str, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{stream}-{number:06d}.arrow"

    def _shard(self, stream: str, number: int, until: float = math.inf) -> Iterable[Problem]:
        if self._folder is None:
            return islice(self._distinct(stream, number, self._counts, until), _size(stream))
        path = self._path(stream, number)
        if (kept := read_shard(path)) is None:
            counts = Counts()
            kept = list(islice(self._distinct(stream, number, counts), _size(stream))), counts
            write_shard(path, *kept)
            kept = read_shard(path) or kept  # all processes take the same, even of a generator that reads a clock
        problems, counts = kept
        self._counts.add(counts)
        return problems

    def _distinct(self, stream: str, number: int, counts: Counts, until: float = math.inf) -> Iterator[Problem]:
        """Yield distinct problems; once exhausted, end (if held out) or repeat them."""
        seen: set[str] = set()
        misses, held_out, fraction = 0, stream == HELD_OUT, self.config.validation_fraction
        for candidate in self._candidates(stream, number):
            if time.monotonic() > until:
                return
            [found] = self._fit([candidate], counts)
            if isinstance(found, Misfit):
                self._misfit = found.text
            elif found.question not in seen and is_held_out(found.question, fraction) == held_out:
                seen.add(found.question)
                misses = 0
                yield found
                continue
            misses += 1
            if misses == MAX_MISSES:
                if held_out or not seen:
                    return
                seen, misses = set(), 0

    def _why_so_few(self, advice: str) -> str:
        return f"of one that was left out, {self._misfit}" if self._misfit else advice

    def _candidates(self, stream: str, number: int) -> Iterator[Problem]:
        seed = derive_seed(self.seed, stream, number)
        rng = Random(seed)
        weights = [generator.weight for generator in self.config.generators]
        sources = [generator.problems(derive_seed(seed, index)) for index, generator in enumerate(self.generators)]
        while True:
            index = rng.choices(range(len(sources)), weights)[0]
            yield replace(next(sources[index]), generator=index)


def _size(stream: str) -> int:
    return HELD_OUT_SHARD if stream == HELD_OUT else SHARD


def write_shard(path: Path, problems: Sequence[Problem], counts: Counts) -> None:
    """Write problems with `plain` entries, and the counts of drawing them, unless another process was faster."""
    rows = [{**vars(problem), "entry": repr(problem.entry)} for problem in problems]
    table = pa.Table.from_pylist(rows, SCHEMA.with_metadata({"counts": json.dumps(asdict(counts))}))
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_table(own, table)
        try:
            os.link(own, path)
        except OSError:  # another process was, the file is damaged, or the file system has no hard links
            if read_shard(path) is None:
                own.replace(path)
        own.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be written, and its problems are drawn each time: %s", path, error)


def read_shard(path: Path) -> tuple[list[Problem], Counts] | None:
    """Read what `write_shard` wrote; None if missing or unreadable."""
    try:
        table = read_table(path)
        rows = [{**row, "entry": ast.literal_eval(row["entry"])} for row in table.to_pylist()]
        return [Problem(**row) for row in rows], Counts(**json.loads(table.schema.metadata[b"counts"]))
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowInvalid, SyntaxError, TypeError, ValueError) as error:
        logger.warning("%s cannot be read, and its problems are drawn again: %s", path, error)
        return None
