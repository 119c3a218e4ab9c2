"""Texts to draft from: their exchange between the ranks that generated them and those that use them, their files, and
responses of earlier epochs, which serve as drafts when their prompt is asked again."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from specrl.distributed import Ragged, Ranks, Route, deliver, gather_columns
from specrl.schemas import Rollout, read_table, write_table

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
    ranks: Ranks,
    texts: Sequence[PregeneratedText],
    owners: Mapping[int, int],
    readers: Sequence[Container[int]],
    engine_size: int,
) -> list[PregeneratedText]:
    """Send each text to the ranks of the engine that has its seed next, or else of those that answer its prompt.

    Collective.

    Args:
        texts: Those of this rank's engine, whose first rank sends them.
        owners: The engine of each seed of the next step.
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
    everyone, named = range(ranks.world_size), list(zip(*(columns[name].tolist() for name in numbers), strict=True))

    def wants(engine: int, prompt: int, seed: int) -> bool:
        return owners[seed] == engine if seed in owners else prompt in readers[engine]

    by_engine = [np.flatnonzero([wants(engine, *text) for text in named]) for engine in range(len(readers))]
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


PER_PROMPT = 4
"""The responses kept of each group, over all engines: those with the lowest sample numbers."""
MOST_TOKENS = 2**24
"""The tokens kept on each rank: 64 MiB. Prompts answered longest ago are dropped first."""


MOST_DELIVERED = 2**20
"""The tokens of earlier epochs that an engine gets for a step. Indexing one takes up to 750 bytes for a moment."""


class EarlierResponses:
    """The newest responses to each prompt, as far as this rank's engine generated them."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self._groups: dict[int, list[PregeneratedText]] = {}  # by prompt id, those answered longest ago first
        self._num_tokens = 0

    def add(self, prompt_ids: Iterable[int], rollouts: Iterable[Rollout]) -> None:
        """Add this engine's rollouts of a step, in groups, and drop older responses to any of the step's prompts."""
        for prompt_id in prompt_ids:
            self._drop(prompt_id)
        kept = (rollout for rollout in rollouts if rollout.sample < PER_PROMPT)
        for prompt_id, group in groupby(kept, key=lambda rollout: rollout.prompt_id):
            self._put([PregeneratedText(prompt_id, rollout.seed, rollout.response_tokens) for rollout in group])

    def to(self, prompt_ids: Iterable[int], most_tokens: int = MOST_DELIVERED) -> list[PregeneratedText]:
        """The responses to these prompts, as many of the first as have at most `most_tokens` together."""
        texts = [text for prompt_id in prompt_ids for text in self._groups.get(prompt_id, ())]
        totals = accumulate(len(text.tokens) for text in texts)
        return [text for text, total in zip(texts, totals, strict=True) if total <= most_tokens]

    def restore(self, rollouts_dir: Path, first_step: int, engine: int, num_engines: int) -> None:
        """Read the rollouts of steps before `first_step` from disk; the engines divide the files of each step.

        Reading stops after as many consecutive steps without a new prompt as there were steps with one: an epoch
        contains each prompt once.
        """
        seen: set[int] = set()
        newest: list[list[PregeneratedText]] = []
        num_tokens = with_news = without = 0
        for step in reversed(range(first_step)):
            own, prompt_ids = _read(rollouts_dir / f"step={step:06d}", engine, num_engines, seen)
            newest += reversed(own)
            num_tokens += sum(len(text.tokens) for group in own for text in group)
            with_news, without = (with_news, without + 1) if prompt_ids <= seen else (with_news + 1, 0)
            seen |= prompt_ids
            if num_tokens > self._most or without > with_news:
                break
        for group in reversed(newest):
            self._put(group)

    def _put(self, group: list[PregeneratedText]) -> None:
        prompt_id = group[0].prompt_id
        self._drop(prompt_id)
        self._groups[prompt_id] = group
        self._num_tokens += sum(len(text.tokens) for text in group)
        while self._num_tokens > self._most:
            self._drop(next(iter(self._groups)))

    def _drop(self, prompt_id: int) -> None:
        self._num_tokens -= sum(len(text.tokens) for text in self._groups.pop(prompt_id, ()))


def _read(
    folder: Path, engine: int, num_engines: int, known: Container[int]
) -> tuple[list[list[PregeneratedText]], set[int]]:
    """The groups in one engine's files whose prompts are not known yet, and all prompts of the step."""
    groups: dict[int, list[PregeneratedText]] = {}
    dealt: dict[int, int] = {}  # the engine of each writing rank, in turn: there may have been another number
    prompt_ids: set[int] = set()
    for path in sorted(folder.glob("rank-*.arrow")):
        table = read_table(path)
        columns = [table[name].to_pylist() for name in ("rank", "prompt_id", "sample", "seed")]
        for row, (rank, prompt_id, sample, seed) in enumerate(zip(*columns, strict=True)):
            prompt_ids.add(prompt_id)
            own = dealt.setdefault(rank, len(dealt) % num_engines) == engine
            if own and prompt_id not in known and sample < PER_PROMPT:
                tokens = array("i", table["response_tokens"][row].values.to_numpy().tobytes())
                groups.setdefault(prompt_id, []).append(PregeneratedText(prompt_id, seed, tokens))
    return list(groups.values()), prompt_ids
