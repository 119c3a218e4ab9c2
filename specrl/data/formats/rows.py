"""Reads rows of data files (JSON, JSON lines, CSV and Parquet), each with its place in words."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from specrl.config import ConfigError
from specrl.data.formats.places import SUFFIXES, suffix_of
from specrl.models.directory import LFS_POINTER

LONGEST_LINE = 16 * 2**20  # bytes; a file with longer lines is not JSONL
SYNONYMS = {
    "prompt_column": "question problem query instruction input",
    "answer_column": "solution ground_truth final_answer expected_answer target label output completion",
}
"""Other common names of columns, by setting."""
Rows = Iterator[tuple[str, dict[str, Any]]]


def read_rows(path: Path, columns: Sequence[str] = ()) -> Rows:
    """Yield (place in words, row) for a file; `columns` restricts what must be read."""
    reader = READERS.get(suffix_of(path))
    if reader is None:
        raise ConfigError(f"data file {path}: the name must end in {', '.join(SUFFIXES)}, or in that and .gz")
    try:
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER.encode():
                raise ConfigError(f"data file {path} is a Git LFS pointer: run `git lfs pull` where it lies")
        yield from reader(path, columns)
    except (OSError, EOFError, zlib.error) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ConfigError(f"data file {path} cannot be read: {reason}") from error


def read_objects(path: Path) -> Rows:
    """Yield (place, object) for each line of a JSONL file."""
    with _open(path) as file:
        for number in itertools.count(1):
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                return
            place = f"data file {path}, line {number}"
            if len(line) > LONGEST_LINE:
                raise ConfigError(f"{place} is longer than {LONGEST_LINE // 2**20} MiB; a line must be one JSON object")
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield place, _object(place, _parsed(place, line))


def find(row: Mapping[str, Any], column: str, place: str, key: str, aliases: Sequence[str] = ()) -> Any:
    """Find a column's value, also by a dotted name such as `extra_info.answer`; `key` is its setting."""
    for name in (column, *aliases):
        value: Any = row
        for part in [name] if name in row else name.split("."):
            value = structured(value)
            if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, Mapping) and part in value:
                value = value[part]
            else:
                break
        else:
            return value
    names = shorten(", ".join(row), 200) or "none"
    nested = next(
        (f"{name}.{inner}" for name, value in row.items() if isinstance(value, dict) for inner in value), None
    )
    example = f"; what lies within one is named like {nested}" if nested else ""
    known = {name.strip().casefold(): name for name in row}
    likely = [*get_close_matches(column.casefold(), known, 1), *SYNONYMS.get(key, "").split()]
    meant = next((f"; perhaps data.{key} = {known[name]!r}" for name in likely if name in known), "")
    raise ConfigError(f"{place} has no column {column!r} (data.{key}); it has {names}{example}{meant}")


def structured(value: Any) -> Any:
    """Parse text that holds an object or a list, as in some data sets; return anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        start = file.read(4)
    for mark, suffix in (b"\x1f\x8b", ".gz"), (b"PAR1", ".parquet"):
        if start.startswith(mark) and path.suffix != suffix:
            raise ConfigError(f"data file {path} has the content of a {suffix} file: its name must end so")
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _parsed(place: str, text: bytes) -> Any:
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place} is not UTF-8 text ({error.reason} at its byte {error.start}); save the file as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        hint = "; an object or list of several lines is a .json file" if text.strip() in (b"[", b"{") else ""
        raise ConfigError(f"{place} is not JSON: {error}{hint}") from error


def _object(place: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{place} must be a JSON object")
    return row


def _json(path: Path, columns: Sequence[str]) -> Rows:
    """Yield the objects of one list, which may be an object's only member or its `data`, or those of the lines."""
    with _open(path) as file:
        text = file.read().removeprefix(codecs.BOM_UTF8)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if text.lstrip().startswith(b"["):
            _parsed(f"data file {path}", text)
        yield from read_objects(path)
        return
    members = value if isinstance(value, dict) else {"data": value}
    rows = members.get("data", next(iter(members.values())) if len(members) == 1 else None)
    for number, row in enumerate(rows if isinstance(rows, list) else [value], 1):
        place = f"data file {path}, row {number}"
        yield place, _object(place, row)


def _csv(path: Path, columns: Sequence[str]) -> Rows:
    csv.field_size_limit(LONGEST_LINE)
    with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        number = 0
        try:
            first = text.readline()
            text.seek(0)
            if first and not first.strip():
                raise ConfigError(f"data file {path} begins with an empty line: the first one must name the columns")
            # With decimal commas, spreadsheets separate by semicolons.
            between = ";" if ";" in first and "," not in first else ","
            rows = csv.DictReader(text, delimiter="\t" if suffix_of(path) == ".tsv" else between, strict=True)
            _check_names(path, rows.fieldnames or ())
            for number, row in enumerate(rows, 1):
                place = f"data file {path}, row {number}"
                if None in row or None in row.values():
                    raise ConfigError(f"{place} has not the {len(rows.fieldnames or ())} fields of the first line")
                yield place, {name: value or None for name, value in row.items()}
        except UnicodeDecodeError as error:
            raise ConfigError(f"data file {path} is not UTF-8 text; save the file as UTF-8") from error
        except csv.Error as error:
            raise ConfigError(f"data file {path}, row {number + 1} is not CSV: {error}") from error


def _check_names(path: Path, names: Sequence[str]) -> None:
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise ConfigError(f"data file {path} has several columns {twice!r}: which one counts is not known")


def _parquet(path: Path, columns: Sequence[str]) -> Rows:
    try:
        with _open(path) as file:
            source = pq.ParquetFile(pa.BufferReader(file.read()) if path.suffix == ".gz" else path)
            names = source.schema_arrow.names
            _check_names(path, names)
            chosen = {name for column in columns for name in (column, column.partition(".")[0]) if name in names}
            rows = source.read(columns=sorted(chosen) if columns else None).to_pylist(maps_as_pydicts="lossy")
    except (pa.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"data file {path} is not readable as Parquet: {reason}") from error
    others = dict.fromkeys(name for name in names if name not in chosen) if columns else {}
    for number, row in enumerate(rows, 1):
        yield f"data file {path}, row {number}", {**row, **others}


READERS: Mapping[str, Callable[[Path, Sequence[str]], Rows]] = {
    ".jsonl": lambda path, _: read_objects(path),
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
