"""Text acceptance: how much text is worth drafting, and whether the drafter would do better.

It is learned from the outcomes of drafts. Text of a request's own seed is mostly right to its end. Text that agrees
with the response by only two tokens is mostly wrong, and sixteen tokens of it cost the verification of seventeen rows.
What is chosen here decides the time alone, never a token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import DRAFTER, DraftOutcome

Kind = tuple[str, int]
"""The name of a text source, and the agreement of its cursor with the response so far."""
NO_TEXT: Kind = (DRAFTER, 0)
"""The kind of a draft that does not come from text."""


class TextAcceptance:
    """The probability that the next token of text is right, by how well the text agreed with the response.

    Tokens are taken to be right or wrong one by one with the same probability: a draft shows as many successes as it
    had tokens accepted, and a failure unless all were.
    """

    def __init__(self, settings: ControlSettings) -> None:
        """Begin with the same guess for every kind of text."""
        self._settings = settings
        self._right: dict[Kind, float] = defaultdict(float)
        self._wrong: dict[Kind, float] = defaultdict(float)
        self._drafter = 0.0
        """The running mean of the accepted tokens of a draft of the drafter."""
        self._drafts = 0
        """The number of the drafter's drafts that the mean is over, at most `text_window`."""

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn from an iteration's drafts."""
        from_text = [outcome for outcome in outcomes if outcome.source != DRAFTER]
        keep = (1 - 1 / self._settings.text_window) ** len(from_text)
        for counts in (self._right, self._wrong):
            for kind in counts:
                counts[kind] *= keep
        for outcome in from_text:
            self._right[outcome.source, outcome.agreement] += outcome.accepted
            self._wrong[outcome.source, outcome.agreement] += outcome.accepted < outcome.drafted
        for outcome in outcomes:
            if outcome.source == DRAFTER:
                self._drafts = min(self._drafts + 1, self._settings.text_window)
                self._drafter += (outcome.accepted - self._drafter) / self._drafts

    def probability(self, kind: Kind) -> float:
        """Return the probability that a token of such text is right, given that the one before it was."""
        # The guess counts as `prior_drafts` drafts, each with some tokens right, more where more agreed, and one wrong.
        weight, (_, agreement) = self._settings.prior_drafts, kind
        wrong = weight + self._wrong[kind]
        right = weight * agreement / self._settings.even_agreement + self._right[kind]
        return right / (right + wrong)

    def chances(self, kind: Kind, length: int) -> list[float]:
        """Return for each token of a draft from such text the probability that it and all before it are right."""
        probability = self.probability(kind)
        return [probability**place for place in range(1, length + 1)]

    def length(self, kind: Kind, longest: int, drafter_drafts: bool) -> int:
        """Return how many tokens of text to draft; 0 where the drafter is expected to get more accepted.

        Args:
            longest: The most tokens to draft.
            drafter_drafts: Whether the drafter proposes a draft as well; if not, at least one token of text is drafted.
        """
        probability = self.probability(kind)
        length, expected, alive = 0, 0.0, 1.0
        while length < longest and (alive := alive * probability) >= self._settings.least_probability:
            length, expected = length + 1, expected + alive
        if drafter_drafts:
            return length if expected >= self._drafter else 0
        return max(length, min(1, longest))
