"""The rows of benchmarks as Arrow tables: what a job of a sweep leaves, and what its page is made from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from specrl.artifacts import atomic_path

ROWS_FILE = "rows.arrow"
"""The Arrow file of a cell's rows, in the folder of its results."""


def to_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return an Arrow table with a column for each key of any row, empty where a row lacks it.

    A column whose values are of several types, such as 3 and "adaptive", holds them as text.
    """
    columns = dict.fromkeys(column for row in rows for column in row)
    return pa.table({column: _column([row.get(column) for row in rows]) for column in columns})


def _column(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
        return pa.array(texts, pa.string())


def write_arrow(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as an Arrow IPC file."""
    table = to_table(rows)
    with (
        atomic_path(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)


def read_arrow(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that `write_arrow` wrote."""
    with pa.memory_map(str(path)) as source:
        rows: list[dict[str, Any]] = pa.ipc.open_file(source).read_all().to_pylist()
    return rows


def convert(json_path: Path, arrow_path: Path) -> None:
    """Write what a benchmark has written as JSON, rows or a single object, as an Arrow file."""
    found = json.loads(json_path.read_text())
    write_arrow(arrow_path, found if isinstance(found, list) else [found])
