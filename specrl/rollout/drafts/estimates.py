"""Estimates of what draft lengths bring, in tokens per request and iteration, learned from every iteration's drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import DRAFTER, DraftOutcome

LENGTHS = (0, 1, 2, 3, 5, 8)
"""The drafter's draft lengths to choose from, in tokens, up to `speculation.k`, which is always one of them."""
REPLAY_LENGTHS = (0, 4, 8, 16)
"""The lengths of drafts from text to choose from, in tokens, up to `speculation.replay_k`, always one of them."""


class DraftLengths(NamedTuple):
    """The longest drafts of an iteration, in tokens; the controller chooses among such pairs."""

    k: int
    """The longest draft of the drafter."""
    replay_k: int
    """The longest draft from text, stored or recent."""


NO_DRAFTS = DraftLengths(0, 0)


def possible_lengths(k: int, replay_k: int) -> list[DraftLengths]:
    """Return every combination of a few lengths of the two sources, up to the longest, in ascending order."""
    lengths = sorted({length for length in (*LENGTHS, k) if length <= k})
    replay_lengths = sorted({length for length in (*REPLAY_LENGTHS, replay_k) if length <= replay_k})
    return [DraftLengths(length, replay) for length in lengths for replay in replay_lengths]


class TokensPerIteration:
    """Estimates the tokens per request and iteration of each choice of lengths, from sums that fade at every refit."""

    def __init__(self, choices: Sequence[DraftLengths], settings: ControlSettings) -> None:
        self._settings = settings
        self._tokens = dict.fromkeys(choices, 0.0)
        self._requests = dict.fromkeys(choices, 0.0)

    def observe(self, batch: int, lengths: DraftLengths, outcomes: Sequence[DraftOutcome]) -> None:
        """Count an iteration for `lengths` and for all shorter drafts, whose outcome it shows as well."""
        drafted = _accepted_within([outcome for outcome in outcomes if outcome.source == DRAFTER], lengths.k)
        from_text = [outcome for outcome in outcomes if outcome.source != DRAFTER]
        replayed = _accepted_within(from_text, lengths.replay_k)
        for shorter in self._tokens:
            # Without text these requests would have got the drafter's drafts, of which nothing is known.
            known = shorter.replay_k > 0 or shorter.k == 0 or not from_text
            if shorter.k > lengths.k or shorter.replay_k > lengths.replay_k or not known:
                continue
            tokens = batch + drafted[shorter.k] + replayed[shorter.replay_k]
            self._tokens[shorter] += tokens
            self._requests[shorter] += batch

    def expected(self, lengths: DraftLengths, shared: TokensPerIteration | None = None) -> float:
        """Return the expected tokens per request and iteration, at least 1.

        Args:
            shared: What was seen at all batch sizes. The less was seen here, the nearer is the estimate to that, or
                without it to a guess.
        """
        if lengths == NO_DRAFTS:
            return 1.0
        guess = self._guess(lengths) if shared is None else shared.expected(lengths)
        weight = self._settings.prior_requests
        # The weight evens out choices seen at different times: text may match nothing for a while, then well.
        return max(1.0, (weight * guess + self._tokens[lengths]) / (weight + self._requests[lengths]))

    def _guess(self, lengths: DraftLengths) -> float:
        """Guess optimistically, so that longer drafts are tried: the gain between shorter lengths goes on."""
        for axis in (0, 1):
            shorter = sorted(
                other for other in self._tokens if other[axis] < lengths[axis] and other[1 - axis] == lengths[1 - axis]
            )[-2:]
            if len(shorter) == 2 and self._requests[shorter[1]]:
                less, more = (self.expected(other) for other in shorter)
                slope = max(0.0, more - less) / (shorter[1][axis] - shorter[0][axis])
                return more + slope * (lengths[axis] - shorter[1][axis])
        return sum(self._settings.guessed_acceptance**i for i in range(max(lengths) + 1))

    def fade(self) -> None:
        """Let new observations soon outweigh the old ones, because policy or drafter has changed."""
        for sums in (self._tokens, self._requests):
            for lengths in sums:
                sums[lengths] *= self._settings.kept_on_refit


def _accepted_within(outcomes: Sequence[DraftOutcome], longest: int) -> list[int]:
    """Return how many tokens would have been accepted, over all drafts, had these been cut to 0, 1, ..., `longest`."""
    at_position = [sum(outcome.accepted > position for outcome in outcomes) for position in range(longest)]
    return list(accumulate(at_position, initial=0))
