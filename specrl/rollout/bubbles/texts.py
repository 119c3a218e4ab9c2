"""Texts to draft from: their exchange between the ranks that generated them and those that use them, and files."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from specrl.distributed import Ragged, Ranks, Route, deliver, gather_columns
from specrl.schemas import read_table, write_table

SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.int64(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
    ]
)


class PregeneratedText(NamedTuple):
    """A response to draft from: pre-generated, and possibly cut short, or from an earlier epoch."""

    prompt_id: int
    seed: int
    """The seed with which it was sampled."""
    tokens: Sequence[int]


def deliver_texts(
    ranks: Ranks, texts: Sequence[PregeneratedText], readers: Sequence[Container[int]], engine_size: int
) -> list[PregeneratedText]:
    """Send each text to the ranks of the engines that answer its prompt next (collective).

    Args:
        texts: Those of this rank's engine, whose first rank sends them.
        readers: The ids of the prompts that each engine answers next.
        engine_size: The number of consecutive ranks that form one engine.

    Returns:
        The texts for this rank's engine, in the order of the ranks that sent them.
    """
    sent = list(texts) if ranks.rank % engine_size == 0 else []
    numbers = {
        "prompt_id": np.array([text.prompt_id for text in sent], np.int64),
        "seed": np.array([text.seed for text in sent], np.int64),
    }
    columns, sender = gather_columns(ranks, numbers)
    asked, everyone = columns["prompt_id"].tolist(), range(ranks.world_size)
    by_engine = [np.flatnonzero([prompt in answered for prompt in asked]) for answered in readers]
    wanted = [by_engine[rank // engine_size] for rank in everyone]
    route = Route(sender, wanted, [np.flatnonzero(sender == rank) for rank in everyone])
    tokens = deliver(ranks, {"tokens": Ragged.of([text.tokens for text in sent], np.int32)}, route)["tokens"]
    own = wanted[ranks.rank]
    about = zip(columns["prompt_id"][own].tolist(), columns["seed"][own].tolist(), tokens, strict=True)
    return [PregeneratedText(prompt, seed, row.tolist()) for prompt, seed, row in about]


def write_texts(path: Path, texts: Sequence[PregeneratedText]) -> None:
    write_table(path, pa.Table.from_pylist([text._asdict() for text in texts], schema=SCHEMA))


def read_texts(path: Path) -> list[PregeneratedText]:
    return [PregeneratedText(**row) for row in read_table(path).to_pylist()]
