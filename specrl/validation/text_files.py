"""Files of texts to draft from, which one validation leaves for the next and training for the one after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from specrl.artifacts import atomic_path
from specrl.rollout.bubbles.texts import PregeneratedText

SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.int64(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
    ]
)


def write_texts(path: Path, texts: Sequence[PregeneratedText]) -> None:
    """Write texts as an Arrow file with a row for each."""
    table = pa.Table.from_pylist([text._asdict() for text in texts], schema=SCHEMA)
    with atomic_path(path) as temporary, pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as file:
        file.write_table(table)


def read_texts(path: Path) -> list[PregeneratedText]:
    """Read the texts of a file that `write_texts` wrote."""
    with pa.memory_map(str(path)) as source:
        return [PregeneratedText(**row) for row in pa.ipc.open_file(source).read_all().to_pylist()]
