"""Drafts from text: the choice of a text source for each response in progress, and of the draft's length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.estimates import DraftLengths
from specrl.rollout.drafts.text_acceptance import NO_TEXT, Kind, TextAcceptance
from specrl.rollout.drafts.text_sources import TextCursor, TextSource


class TextDrafts:
    """The text sources of one engine, and how likely each kind of their text is to be accepted.

    A response keeps one cursor for each source that has text for it.
    """

    def __init__(self, sources: Sequence[TextSource], settings: ControlSettings) -> None:
        self.sources = sources
        self.acceptance = TextAcceptance(settings)

    def begin(self, recall: bool) -> None:
        """Begin a generation; see `TextSource.begin`."""
        for text in self.sources:
            text.begin(recall)

    def remember(self, response: Sequence[int]) -> None:
        """Show the sources a response of this generation, finished or stopped."""
        for text in self.sources:
            text.remember(response)

    def cursors(self, prompt_tokens: Sequence[int], seed: int) -> Mapping[str, TextCursor]:
        """Return cursors for a new response, by the name of their source."""
        cursors = {text.name: text.cursor(prompt_tokens, seed) for text in self.sources}
        return {name: cursor for name, cursor in cursors.items() if cursor is not None}

    def draft(self, cursors: Mapping[str, TextCursor], lengths: DraftLengths) -> tuple[Kind, list[int]]:
        """Return the kind and the tokens of the draft that is likeliest to be right.

        There are no tokens where no text agrees, or where the drafter is expected to do better.
        """
        kinds = [(source, cursor.agreement) for source, cursor in cursors.items() if cursor.agreement]
        if not kinds:
            return NO_TEXT, []
        best = max(kinds, key=self.acceptance.probability)
        length = self.acceptance.length(best, lengths.replay_k, drafter_drafts=lengths.k > 0)
        return best, cursors[best[0]].draft(length)
