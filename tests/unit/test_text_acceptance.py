"""Text acceptance: how likely the next tokens of stored text are to be accepted, and how many are drafted."""

from __future__ import annotations

import pytest

from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import DRAFTER, RECENT, REPLAY, DraftOutcome
from specrl.rollout.drafts.replay import OWN_SEED
from specrl.rollout.drafts.text_acceptance import TextAcceptance

SETTINGS = ControlSettings()


def test_text_of_the_own_seed_is_drafted_far_and_a_loose_match_is_not() -> None:
    acceptance = TextAcceptance(SETTINGS)
    assert acceptance.length((REPLAY, OWN_SEED), 16, drafter_drafts=False) == 16
    agreements = (2, SETTINGS.longest_suffix)
    loose, close = (acceptance.length((REPLAY, agreed), 16, drafter_drafts=False) for agreed in agreements)
    assert loose < close < 16


def test_each_kind_of_text_has_the_acceptance_of_its_own_drafts() -> None:
    acceptance = TextAcceptance(SETTINGS)
    acceptance.observe([DraftOutcome(RECENT, 4, 0, 5)] * 100 + [DraftOutcome(REPLAY, 16, 16, 5)] * 100)
    assert acceptance.probability((RECENT, 5)) < 0.2
    assert acceptance.probability((REPLAY, 5)) > 0.9


@pytest.mark.parametrize(("accepted", "length"), [(16, 16), (3, 4), (0, 1)])
def test_what_is_drafted_follows_what_was_accepted(accepted: int, length: int) -> None:
    acceptance = TextAcceptance(SETTINGS)
    acceptance.observe([DraftOutcome(REPLAY, 16, accepted, 5)] * 500)
    assert acceptance.length((REPLAY, 5), 16, drafter_drafts=False) == length
    assert acceptance.length((REPLAY, 5), 2, drafter_drafts=False) == min(2, length)
    assert acceptance.length((REPLAY, 5), 0, drafter_drafts=False) == 0


def test_the_drafter_goes_first_where_it_gets_more_accepted_and_is_not_asked_where_it_does_not() -> None:
    acceptance = TextAcceptance(SETTINGS)
    acceptance.observe([DraftOutcome(DRAFTER, 3, 2)] * 500)
    acceptance.observe([DraftOutcome(REPLAY, 16, 1, 3)] * 200 + [DraftOutcome(REPLAY, 16, 14, OWN_SEED)] * 200)
    assert acceptance.length((REPLAY, 3), 16, drafter_drafts=True) == 0
    assert acceptance.length((REPLAY, 3), 16, drafter_drafts=False) > 0
    assert acceptance.length((REPLAY, OWN_SEED), 16, drafter_drafts=True) == 16


def test_lost_trust_comes_back() -> None:
    acceptance = TextAcceptance(SETTINGS)
    acceptance.observe([DraftOutcome(REPLAY, 16, 0, 4)] * 200)
    lost = acceptance.probability((REPLAY, 4))
    acceptance.observe([DraftOutcome(REPLAY, 16, 16, OWN_SEED)] * 5000)
    assert lost < 0.2
    assert acceptance.probability((REPLAY, 4)) > 0.6
