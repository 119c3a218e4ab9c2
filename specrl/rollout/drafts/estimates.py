"""What draft lengths are worth: tokens per request and iteration, learned from the drafts of every iteration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from specrl.rollout.drafts.acceptance import DRAFTER, DraftOutcome

LENGTHS = (0, 1, 2, 3, 5, 8)
REPLAY_LENGTHS = (0, 4, 8, 16)
MEMORY = 500
"""Iterations after which an observation counts 1/e: the sliding window."""
PRIOR_REQUESTS = 8.0
"""Weight of the guess, in requests x iterations."""
SHARED_REQUESTS = 200.0
"""Weight of all batch sizes' yield beside one's own, in requests x iterations."""
GUESSED_ACCEPTANCE = 0.6
CONTINUATION = 0.8
FADED = 0.1
"""Weight that observations keep when the drafter changes."""


class DraftLengths(NamedTuple):
    """Longest drafts of an iteration, tokens: of the drafter, and from text, the prompt's or recent."""

    k: int
    replay_k: int


def possible_lengths(k: int, replay_k: int) -> list[DraftLengths]:
    """Few lengths up to the longest, in ascending order; every combination of the two sources."""
    lengths = sorted({length for length in (*LENGTHS, k) if length <= k})
    replay_lengths = sorted({length for length in (*REPLAY_LENGTHS, replay_k) if length <= replay_k})
    return [DraftLengths(length, replay) for length in lengths for replay in replay_lengths]


def expected_log_cost(arm: DraftLengths) -> float:
    """A guess of an arm's log time per iteration, before anything is measured: drafting costs more than verifying."""
    return 0.1 * arm.k + 0.02 * arm.replay_k


class TokensPerIteration:
    """Tokens per request and iteration by arm: exponentially forgotten sums."""

    def __init__(self, arms: Sequence[DraftLengths]) -> None:
        self._tokens = dict.fromkeys(arms, 0.0)
        self._requests = dict.fromkeys(arms, 0.0)

    def observe(self, batch: int, arm: DraftLengths, outcomes: Sequence[DraftOutcome]) -> None:
        """Count an iteration for `arm` and for every arm with shorter drafts, whose outcome it shows as well."""
        drafted = _accepted_within([outcome for outcome in outcomes if outcome.source == DRAFTER], arm.k)
        replayed = _accepted_within([outcome for outcome in outcomes if outcome.source != DRAFTER], arm.replay_k)
        any_replayed = any(outcome.source != DRAFTER for outcome in outcomes)
        keep = 1 - 1 / MEMORY
        for shorter in self._tokens:
            # Without replay its requests would have got drafts of the drafter, of which nothing is known.
            known = shorter.replay_k > 0 or shorter.k == 0 or not any_replayed
            if shorter.k > arm.k or shorter.replay_k > arm.replay_k or not known:
                continue
            tokens = batch + drafted[shorter.k] + replayed[shorter.replay_k]
            self._tokens[shorter] = keep * self._tokens[shorter] + tokens
            self._requests[shorter] = keep * self._requests[shorter] + batch

    def expected(self, arm: DraftLengths, shared: TokensPerIteration | None = None) -> float:
        """Tokens per request and iteration; where little was seen, nearer to the shared estimate or a guess."""
        if arm == DraftLengths(0, 0):
            return 1.0
        guess, weight = (
            (self._guess(arm), PRIOR_REQUESTS) if shared is None else (shared.expected(arm), SHARED_REQUESTS)
        )
        # Text may match nothing for a while and then well: arms seen at different times compare badly.
        return max(1.0, (weight * guess + self._tokens[arm]) / (weight + self._requests[arm]))

    def _guess(self, arm: DraftLengths) -> float:
        """Hopeful, so that longer drafts are tried: what was seen goes on nearly as it does between shorter ones."""
        for axis in (0, 1):
            shorter = sorted(a for a in self._tokens if a[axis] < arm[axis] and a[1 - axis] == arm[1 - axis])[-2:]
            if len(shorter) == 2 and self._requests[shorter[1]]:
                less, more = (self.expected(a) for a in shorter)
                slope = max(0.0, more - less) / (shorter[1][axis] - shorter[0][axis])
                return more + CONTINUATION * slope * (arm[axis] - shorter[1][axis])
        return sum(GUESSED_ACCEPTANCE**i for i in range(max(arm) + 1))

    def fade(self) -> None:
        for sums in (self._tokens, self._requests):
            for arm in sums:
                sums[arm] *= FADED


def _accepted_within(outcomes: Sequence[DraftOutcome], longest: int) -> list[int]:
    """Tokens that would have been accepted with drafts of at most 0, 1, ..., `longest` tokens."""
    at_position = [sum(outcome.accepted > position for outcome in outcomes) for position in range(longest)]
    return list(accumulate(at_position, initial=0))
