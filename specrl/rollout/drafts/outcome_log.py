"""Single drafts as they were verified, and their counters by the length of the context or of the response."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from specrl.rollout.drafts.acceptance import DRAFTER, DraftOutcome, SpeculationStats

SHORTEST = 16
"""The upper end of the first range of lengths, in tokens; each further range is as long as all before it."""


class VerifiedDraft(NamedTuple):
    """A draft that was verified."""

    seed: int
    """The seed of its request."""
    context: int
    """The number of tokens before the draft, prompt included."""
    drafted: int
    """The number of its tokens."""
    accepted: int
    """The number of these that were accepted."""
    source: str = DRAFTER
    """The name of its source."""


def counters(drafts: Iterable[VerifiedDraft]) -> SpeculationStats:
    """Return the counters of these drafts."""
    return SpeculationStats.of([DraftOutcome(draft.source, draft.drafted, draft.accepted) for draft in drafts])


def by_length(
    drafts: Iterable[VerifiedDraft], length: Callable[[VerifiedDraft], int]
) -> dict[tuple[int, int], SpeculationStats]:
    """Return the counters by ranges of a length, from the shortest on.

    Args:
        length: What gives the length of a draft's context, or of the response that it belongs to, in tokens.

    Returns:
        The counters by the first and the last length of a range; ranges without drafts are left out.
    """
    found: dict[tuple[int, int], list[VerifiedDraft]] = {}
    for draft in drafts:
        found.setdefault(length_range(length(draft)), []).append(draft)
    return {ends: counters(found[ends]) for ends in sorted(found)}


def length_range(length: int) -> tuple[int, int]:
    """Return the first and the last length of the range that a length lies in: 0 to 15, 16 to 31, 32 to 63, ..."""
    if length < SHORTEST:
        return 0, SHORTEST - 1
    first = 1 << (length.bit_length() - 1)
    return first, 2 * first - 1
