"""Text sources: where drafts come from that no model proposes.

A `TextSource` belongs to an engine and outlives its generations. For every new response it hands out a cursor, which
takes the response's tokens as they come and proposes those that may follow. Which sources a method has stands in its
row of `specrl.config.methods`; what a source proposes decides the time alone, never a token.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from specrl.config import SpeculationConfig
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import RECENT, REPLAY
from specrl.rollout.drafts.recent import RecentText
from specrl.rollout.drafts.replay import ReplayCursor, ReplayIndex


class TextCursor(Protocol):
    """Follows one response in progress through text that may continue it."""

    @property
    def agreement(self) -> int:
        """How well the text agrees with the response so far; 0 for not at all.

        How often text is right is learned separately for each value.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the tokens that the response has got since the last call."""
        ...

    def draft(self, k: int) -> list[int]:
        """Return at most `k` tokens that may come next."""
        ...


class TextSource:
    """A source of drafts that is text. A subclass needs `name` and `cursor`."""

    name: ClassVar[str]
    """The name that its drafts are counted under, in `SpeculationStats.by_source`."""

    def __init__(self, speculation: SpeculationConfig, settings: ControlSettings) -> None:
        """Start with no text.

        Args:
            speculation: The section of the configuration, for a source with options.
            settings: The constants that steer drafting.
        """

    def begin(self, recall: bool) -> None:
        """Take note that a generation begins; no cursor is in use.

        Args:
            recall: Whether the generation may draft from earlier responses, and its own are to be remembered.
        """

    def remember(self, response: Sequence[int]) -> None:
        """Take the tokens of a response that was finished or stopped."""

    def cursor(self, prompt_tokens: Sequence[int], seed: int) -> TextCursor | None:
        """Return a cursor for a new response to the prompt, or None if there is nothing to follow."""
        raise NotImplementedError


class StoredTextSource(TextSource):
    """Stored responses to the same prompt, the one of the request's own seed first."""

    name = REPLAY

    def __init__(self, speculation: SpeculationConfig, settings: ControlSettings) -> None:
        super().__init__(speculation, settings)
        self._settings = settings
        self.index = ReplayIndex({})

    def store(
        self,
        texts: Mapping[tuple[int, ...], Sequence[Sequence[int]]],
        seeds: Mapping[tuple[int, ...], Sequence[int]] | None = None,
    ) -> None:
        """Replace the stored responses; see `ReplayIndex.of`."""
        self.index = ReplayIndex.of(texts, seeds, self._settings)

    def cursor(self, prompt_tokens: Sequence[int], seed: int) -> ReplayCursor | None:
        return self.index.cursor(prompt_tokens, seed)


class RecentTextSource(TextSource):
    """The latest responses of this engine, to whatever prompts, in generations with `recall`."""

    name = RECENT

    def __init__(self, speculation: SpeculationConfig, settings: ControlSettings) -> None:
        super().__init__(speculation, settings)
        self._text = RecentText(speculation.recent_tokens, settings) if speculation.recent_tokens else None
        self._recalls = False

    def begin(self, recall: bool) -> None:
        self._recalls = recall
        if self._text is not None:
            self._text.trim()

    def remember(self, response: Sequence[int]) -> None:
        if self._text is not None and self._recalls:
            self._text.add(response)

    def cursor(self, prompt_tokens: Sequence[int], seed: int) -> ReplayCursor | None:
        return ReplayCursor(self._text) if self._text is not None and self._recalls else None


def text_sources(speculation: SpeculationConfig, settings: ControlSettings) -> list[TextSource]:
    """Return a new instance of each of the method's text sources, in the order of its row."""
    return [_import_source(path)(speculation, settings) for path in speculation.draft_method.texts]


def _import_source(path: str) -> type[TextSource]:
    module, _, name = path.partition(":")
    source: type[TextSource] = getattr(importlib.import_module(module), name)
    assert issubclass(source, TextSource), f"{path} is no TextSource"
    return source
