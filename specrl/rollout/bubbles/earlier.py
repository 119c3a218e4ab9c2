"""Responses of earlier epochs, which are drafts when their prompt comes again."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable
from itertools import groupby, islice
from pathlib import Path

import pyarrow as pa

from specrl.rollout.bubbles.texts import PregeneratedText
from specrl.schemas import Rollout

PER_PROMPT = 4
"""The responses kept of each group."""
MOST_TOKENS = 2**24
"""The tokens kept on each rank: 64 MiB. The prompts that were answered longest ago are dropped first."""


class EarlierResponses:
    """The newest responses to each prompt that the engine of this rank has answered."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self._groups: dict[int, list[PregeneratedText]] = {}
        """By prompt id, those answered longest ago first."""
        self._num_tokens = 0

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Take in the rollouts of a step, groups together, in the place of older ones to the same prompts."""
        for prompt_id, group in groupby(rollouts, key=lambda rollout: rollout.prompt_id):
            kept = islice(group, PER_PROMPT)
            self._put([PregeneratedText(prompt_id, rollout.seed, rollout.response_tokens) for rollout in kept])

    def to(self, prompt_ids: Iterable[int]) -> list[PregeneratedText]:
        """List the responses to these prompts."""
        return [text for prompt_id in prompt_ids for text in self._groups.get(prompt_id, ())]

    def restore(self, rollouts_dir: Path, first_step: int, part: int, parts: int) -> None:
        """Take in what the steps before `first_step` have left on disk, in one of so many parts of their files.

        Reading ends where as many steps in a row have brought no new prompt as have brought some: in an epoch, each
        prompt is seen once.
        """
        newest: dict[int, list[PregeneratedText]] = {}
        num_tokens = with_news = without = 0
        for step in reversed(range(first_step)):
            groups = _read(rollouts_dir / f"step={step:06d}", part, parts, newest)
            newest |= dict(reversed(groups.items()))
            num_tokens += sum(len(text.tokens) for group in groups.values() for text in group)
            with_news, without = (with_news + 1, 0) if groups else (with_news, without + 1)
            if num_tokens > self._most or without > with_news:
                break
        for group in reversed(newest.values()):
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


def _read(folder: Path, part: int, parts: int, known: Container[int]) -> dict[int, list[PregeneratedText]]:
    found: dict[int, list[PregeneratedText]] = {}
    for path in sorted(folder.glob("rank-*.arrow"))[part::parts]:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
            prompts, seeds = table["prompt_id"].to_pylist(), table["seed"].to_pylist()
            for row, (prompt_id, seed) in enumerate(zip(prompts, seeds, strict=True)):
                if prompt_id not in known and len(group := found.setdefault(prompt_id, [])) < PER_PROMPT:
                    tokens = table["response_tokens"][row].values.to_numpy()
                    group.append(PregeneratedText(prompt_id, seed, array("i", tokens.tobytes())))
    return found
