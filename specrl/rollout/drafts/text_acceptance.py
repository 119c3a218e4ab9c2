"""How far stored text is worth drafting, and whether the drafter would do better: learned from what became of drafts.

Text of a request's own seed is mostly right to its end; text that agrees by two tokens, after the response has left it,
mostly is not, and sixteen tokens of it cost the verification of seventeen rows. What is chosen here decides the time
alone, never a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from specrl.rollout.drafts.acceptance import DRAFTER, RECENT, REPLAY, DraftOutcome
from specrl.rollout.drafts.replay import LONGEST_SUFFIX, OWN_SEED

PRIOR_DRAFTS = 4.0
"""Weight of the guess, in drafts."""
Kind = tuple[str, int]
"""Source of the text, and the tokens by which it agrees with the response so far, or `OWN_SEED`."""
GUESSES: Mapping[Kind, float] = {
    (REPLAY, OWN_SEED): 0.97,
    **{(REPLAY, agreed): 0.5 + 0.05 * agreed for agreed in range(1, LONGEST_SUFFIX + 1)},
    **{(RECENT, agreed): 0.3 + 0.05 * agreed for agreed in range(1, LONGEST_SUFFIX + 1)},
}
"""Chance that a token is right, before anything was seen."""
LEAST = 0.25
"""A token is drafted while it is right, with all before it, with this probability."""
MEMORY = 1000
"""Drafts of all kinds after which one counts 1/e, so that a kind that lost its trust is tried again."""
DRAFTER_MEMORY = 100
"""The same of the drafter's drafts."""


class TextAcceptance:
    """Chance that the next token of stored text is right, by how well the text agreed with the response.

    Tokens are taken to be right or wrong one by one with the same chance: a draft shows as many successes as it had
    tokens accepted, and a failure unless all were.
    """

    def __init__(self, guesses: Mapping[Kind, float] = GUESSES) -> None:
        self._guesses = guesses
        self._right = dict.fromkeys(guesses, 0.0)
        self._wrong = dict.fromkeys(guesses, 0.0)
        self._drafter = 0.0
        """Accepted tokens of a drafter's draft, a running mean."""

    def observe(self, outcomes: Iterable[DraftOutcome]) -> None:
        """Learn from an iteration's drafts."""
        for outcome in outcomes:
            if outcome.source == DRAFTER:
                self._drafter += (outcome.accepted - self._drafter) / DRAFTER_MEMORY
                continue
            for counts in (self._right, self._wrong):
                for kind in counts:
                    counts[kind] *= 1 - 1 / MEMORY
            self._right[outcome.source, outcome.agreement] += outcome.accepted
            self._wrong[outcome.source, outcome.agreement] += outcome.accepted < outcome.drafted

    def probability(self, kind: Kind) -> float:
        """Of a token to be right where the one before it was."""
        guess = self._guesses[kind]
        # As many failures as PRIOR_DRAFTS drafts end with, and the successes that make the guess of them.
        wrong = PRIOR_DRAFTS + self._wrong[kind]
        right = PRIOR_DRAFTS * guess / (1 - guess) + self._right[kind]
        return right / (right + wrong)

    def length(self, kind: Kind, longest: int, drafter_drafts: bool) -> int:
        """Tokens of stored text to draft, at most `longest`; none where the drafter is expected to get more accepted.

        Args:
            drafter_drafts: the drafter proposes a draft as well.
        """
        chance = self.probability(kind)
        length, expected, alive = 0, 0.0, 1.0
        while length < longest and (alive := alive * chance) >= LEAST:
            length, expected = length + 1, expected + alive
        if drafter_drafts:
            return length if expected >= self._drafter else 0
        return max(length, min(1, longest))
