"""Recent responses to any prompt, looked up by the last tokens of one in progress."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.recent import RecentText
from specrl.rollout.drafts.replay import ReplayCursor, StoredResponses

SETTINGS = ControlSettings()


def remembered(*responses: Sequence[int], most: int = 10_000) -> RecentText:
    text = RecentText(most)
    for response in responses:
        text.add(response)
    return text


def follow(text: RecentText, output: list[int], k: int = 4) -> tuple[list[int], int]:
    cursor = ReplayCursor(text)
    cursor.advance(output)
    return cursor.draft(k), cursor.agreement


def test_a_response_goes_on_as_the_one_that_its_last_tokens_are_found_in() -> None:
    text = remembered([1, 2, 3, 4, 5, 6], [9, 8, 3, 4, 7, 7])
    assert follow(text, [1, 2, 3]) == ([4, 5, 6], 3)
    assert follow(text, [0, 8, 3, 4]) == ([7, 7], 3)
    assert follow(text, [5, 3, 4], 1)[1] == 2
    assert follow(text, [5]) == follow(text, [5, 5]) == ([], 0)


def test_nothing_is_expected_of_its_first_token() -> None:
    assert follow(remembered([1, 2, 3]), [])[0] == []


def test_a_match_does_not_run_from_one_response_into_the_next() -> None:
    text = remembered([1, 2], [3, 4])
    assert follow(text, [2, 3]) == ([], 0)
    assert follow(text, [1, 2])[0] == []


def test_a_cursor_stays_where_it_is_while_responses_are_added() -> None:
    text = remembered([1, 2, 3, 4, 5, 6])
    cursor = ReplayCursor(text)
    cursor.advance([1, 2])
    text.add([7, 1, 2, 9, 9])
    assert cursor.draft(3) == [3, 4, 5]
    cursor.advance([3, 7, 1, 2])
    assert cursor.draft(2) == [9, 9]


def test_the_oldest_responses_are_dropped_whole() -> None:
    text = RecentText(100)
    for start in range(0, 300, 10):
        text.add(range(start, start + 10))
        text.trim()
        assert len(text.tokens) <= 111
    assert follow(text, [290, 291])[0] == [292, 293, 294, 295]
    assert follow(text, [0, 1]) == ([], 0)
    kept = {token for token in text.tokens if token >= 0}
    assert all({token // 10 * 10 + i for i in range(10)} <= kept for token in kept)


def test_of_what_occurs_all_the_time_the_latest_places_are_kept() -> None:
    text = remembered([5, 6] * 10_000, [7, 5, 6, 8])
    assert max(map(len, text._places.values())) <= 2 * SETTINGS.most_places
    assert follow(text, [7, 5, 6], 1) == ([8], 3)


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_search_of_all_responses_finds(seed: int) -> None:
    """The longest agreement, as `StoredResponses` does it, where no place is left out."""
    generator = random.Random(seed)
    responses = [[generator.randrange(5) for _ in range(12)] for _ in range(4)]
    text, stored = remembered(*responses), StoredResponses(responses)
    for _ in range(50):
        output = [generator.randrange(5) for _ in range(generator.randint(1, 12))]
        positions, agreed = text.after_longest_suffix(output)
        expected, longest = stored.after_longest_suffix(output)
        assert (sorted(positions), agreed) == (sorted(expected), longest)
        assert agreed <= SETTINGS.longest_suffix
