"""The responses of the last validation, from which the next one drafts: its prompts and seeds are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specrl.data.problems import Prompt
from specrl.rollout.bubbles.pregeneration import store_texts
from specrl.rollout.bubbles.texts import PregeneratedText, read_texts, write_texts
from specrl.rollout.engine import Engine
from specrl.schemas import Rollout

FOLDER = "last_answers"


class LastAnswers:
    """Keeps the newest responses of this rank's engine to each held-out set, in memory and on disk.

    After an update the policy samples nearly the same text with the same seeds. The responses are drafts and nothing
    else, so that a file may be missing, or be of any policy, without a change to a token.
    """

    def __init__(self, engine: Engine, folder: Path, rank: int) -> None:
        self._engine, self._folder, self._rank = engine, folder, rank
        self._texts: dict[str, dict[int, list[PregeneratedText]]] = {}

    @contextmanager
    def drafted(self, name: str, prompts: Sequence[Prompt]) -> Iterator[None]:
        """Draft from the last responses to these prompts of the set `name`, if the method drafts from stored text."""
        if not self._engine.replays:
            yield
            return
        if name not in self._texts:
            self._texts[name] = self._read(name)
        store_texts(self._engine, prompts, self._texts[name])
        try:
            yield
        finally:
            self._engine.set_replay({})

    def keep(self, name: str, rollouts: Sequence[Rollout]) -> None:
        if not self._engine.replays:
            return
        texts = [PregeneratedText(rollout.prompt_id, rollout.seed, [*rollout.response_tokens]) for rollout in rollouts]
        self._texts[name] = _by_prompt(texts)
        if self._engine.is_first:
            write_texts(self._folder / f"{name}-{self._rank:04d}.arrow", texts)

    def _read(self, name: str) -> dict[int, list[PregeneratedText]]:
        # A restart may have another number of ranks, which deals the prompts in another way.
        paths = sorted(self._folder.glob(f"{name}-????.arrow"))
        return _by_prompt([text for path in paths for text in read_texts(path)])


def _by_prompt(texts: Sequence[PregeneratedText]) -> dict[int, list[PregeneratedText]]:
    found: dict[int, list[PregeneratedText]] = {}
    for text in texts:
        found.setdefault(text.prompt_id, []).append(text)
    return found
