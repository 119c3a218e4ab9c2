from __future__ import annotations

import pytest

from specrl.rollout.drafts.acceptance import SourceCounts, SpeculationStats, VerifiedDraft


def test_rates_follow_the_projects_conventions() -> None:
    stats = SpeculationStats(
        num_drafts=10,
        num_draft_tokens=30,
        num_accepted_tokens=15,
        accepted_per_pos=(8, 5, 2),
        decode_steps=12,
        drafted_per_pos=(10, 10, 5),
    )
    assert stats.acceptance_length == pytest.approx(2.5)
    assert stats.acceptance_rate == pytest.approx(0.5)
    assert stats.acceptance_rate_per_pos == pytest.approx((0.8, 0.5, 0.4))


def test_without_drafts_an_iteration_yields_one_token() -> None:
    assert SpeculationStats(decode_steps=7).acceptance_length == 1
    assert SpeculationStats().acceptance_rate == 0


def draft(source: str, drafted: int, accepted: int) -> VerifiedDraft:
    return VerifiedDraft(context=1, drafted=drafted, accepted=accepted, source=source)


def test_merging_adds_counters_of_different_k_and_source() -> None:
    one = SpeculationStats.of([draft("drafter", 1, 1)] * 3 + [draft("drafter", 1, 0)], decode_steps=5)
    three = SpeculationStats.of([draft("drafter", 3, 3), draft("replay", 3, 1)], decode_steps=3)
    merged = SpeculationStats.merge([one, three])
    assert merged == one + three == three + one
    assert merged == SpeculationStats(
        6, 10, 7, (5, 1, 1), 8, (6, 2, 2), {"drafter": SourceCounts(5, 7, 6), "replay": SourceCounts(1, 3, 1)}
    )


def test_drafts_are_counted_in_one_pass() -> None:
    drafts = [draft("drafter", 2, accepted) for accepted in (0, 1, 2, 2)] * 1000 + [draft("replay", 1, 1)]
    by_source = {"drafter": SourceCounts(4000, 8000, 5000), "replay": SourceCounts(1, 1, 1)}
    assert SpeculationStats.of(iter(drafts), 7) == SpeculationStats(
        4001, 8001, 5001, (3001, 2000), 7, (4001, 4000), by_source
    )
