from __future__ import annotations

import random
import sys
from types import FrameType

import pytest

from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.replay import ReplayIndex

PROMPT = (1, 2, 3)
SETTINGS = ControlSettings()


def propose(responses: list[list[int]], output: list[int], k: int = 4) -> list[int]:
    return ReplayIndex.of({PROMPT: responses}).propose(PROMPT, output, k)


def test_a_response_that_agrees_is_followed_from_its_first_token_to_its_last() -> None:
    stored = [10, 11, 12, 13, 14, 15]
    assert propose([stored], []) == stored[:4]
    assert propose([stored], stored[:3]) == stored[3:]
    assert propose([stored], stored) == []


def test_another_prompt_or_an_empty_store_gives_nothing() -> None:
    index = ReplayIndex.of({PROMPT: [[10, 11]], (9,): []})
    assert index.propose((1, 2), [], 4) == index.propose((9,), [], 4) == []
    assert index.cursor((9,)) is None


def test_of_several_responses_those_that_agree_so_far_are_followed() -> None:
    responses = [[10, 11, 12], [10, 20, 21], [10, 20, 22]]
    assert propose(responses, [10, 11]) == [12]
    assert propose(responses, [10], 1) == [20]  # two of three say so
    assert propose(responses, [10, 20]) == [21]  # as many say the one as the other: the first


OWN, OTHER = 7, 8
SEEDS = {PROMPT: [OTHER, OTHER + 1, OWN]}


def test_the_text_of_its_own_seed_is_followed_whatever_the_others_say() -> None:
    index = ReplayIndex.of({PROMPT: [[10, 11, 12], [10, 11, 13], [10, 20, 21, 22]]}, SEEDS)
    assert index.propose(PROMPT, [], 3, OWN) == [10, 20, 21]
    assert index.propose(PROMPT, [10], 4, OWN) == [20, 21, 22]  # two of three say otherwise
    assert index.propose(PROMPT, [10], 4, seed=99) == index.propose(PROMPT, [10], 4) == [11, 12]


def test_all_vote_once_the_text_of_its_own_seed_was_wrong_or_has_ended() -> None:
    index = ReplayIndex.of({PROMPT: [[10, 11, 12, 13], [10, 11, 12, 14], [10, 11, 30]]}, SEEDS)
    cursor = index.cursor(PROMPT, OWN)
    assert cursor is not None
    cursor.advance([10, 11])
    assert cursor.draft(4) == [30]  # it was stopped there
    cursor.advance([12])
    assert cursor.draft(1) == [13]
    assert index.propose(PROMPT, [10, 11, 30], 4, OWN) == []
    stopped = ReplayIndex.of({PROMPT: [[10, 11, 30, 31], [10, 11, 30, 32], [10, 11]]}, SEEDS)
    assert stopped.propose(PROMPT, [10, 11], 2, OWN) == [30, 31]
    returned = ReplayIndex.of({PROMPT: [[1], [2], [10, 11, 12, 13, 14]]}, SEEDS)
    assert returned.propose(PROMPT, [10, 99, 12, 13], 2, OWN) == [14]  # found again as any other text


def test_how_much_is_stored_for_a_request_is_known() -> None:
    index = ReplayIndex.of({PROMPT: [[10, 11], [12], [10, 20, 21]], (9,): [[1, 2]]}, SEEDS)
    assert index.stored(PROMPT, OWN) == (3, 3)
    assert index.stored(PROMPT, 99) == (3, 0)
    assert index.stored((9,), OWN) == (1, 0)
    assert index.stored((4,), OWN) == (0, 0)


def test_after_a_divergence_the_longest_suffix_is_found_again() -> None:
    stored = [10, 11, 12, 13, 14, 15, 16]
    assert propose([stored], [10, 99]) == []
    assert propose([stored], [10, 99, 13]) == []  # one token is no match
    assert propose([stored], [10, 99, 13, 14]) == [15, 16]
    # Three tokens agree with the second text, two with the first.
    assert propose([[7, 5, 6, 1, 1], [9, 4, 5, 6, 2, 2]], [8, 8, 4, 5, 6]) == [2, 2]


def test_where_several_places_match_alike_most_decide() -> None:
    suffix = list(range(50, 50 + SETTINGS.longest_suffix))
    responses = [[9, 8, *suffix, 1], [7, 8, *suffix, 2], [5, 5, *suffix, 2]]
    assert propose(responses, [4, 4, *suffix], 1) == [2]


def test_a_match_does_not_run_into_the_next_response() -> None:
    assert propose([[10, 11], [12, 13]], [10, 11]) == []
    assert propose([[10, 11], [12, 13]], [99, 11, 12]) == []


def test_a_cursor_step_by_step_agrees_with_matching_from_scratch() -> None:
    generator = random.Random(0)
    for _ in range(200):
        responses = [[generator.randrange(4) for _ in range(30)] for _ in range(3)]
        index = ReplayIndex.of({PROMPT: responses})
        output: list[int] = []
        cursor = index.cursor(PROMPT)
        assert cursor is not None
        while len(output) < 30:
            new = [generator.randrange(4) for _ in range(generator.randint(1, 3))]
            output += new
            cursor.advance(new)
            assert cursor.draft(5) == index.propose(PROMPT, output, 5)
            check_match(responses, output, cursor.draft(1))


def check_match(responses: list[list[int]], output: list[int], draft: list[int]) -> None:
    """What is drafted follows the longest suffix (or the whole output, at a start) that any response has."""
    if not draft:
        return
    ends = [(text[:i], text[i]) for text in responses for i in range(len(text))]
    agreeing = {len(common_suffix(before, output)) for before, after in ends if after == draft[0]}
    longest = max(len(common_suffix(before, output)) for before, _ in ends)
    assert min(max(agreeing), SETTINGS.longest_suffix) == min(longest, SETTINGS.longest_suffix) or output in [
        t[: len(output)] for t in responses
    ]


def common_suffix(left: list[int], right: list[int]) -> list[int]:
    count = 0
    while count < min(len(left), len(right)) and left[-count - 1] == right[-count - 1]:
        count += 1
    return left[len(left) - count :]


@pytest.mark.parametrize("agrees", [True, False])
def test_matching_takes_few_calls_per_token(agrees: bool) -> None:
    """This holds however long the response and the stored text are; calls are counted because clocks are noisy."""
    generator = random.Random(1)
    responses = [[generator.randrange(500) for _ in range(2000)] for _ in range(8)]
    output = responses[3] if agrees else [generator.randrange(500) for _ in range(2000)]
    cursor = ReplayIndex.of({PROMPT: responses}).cursor(PROMPT)
    assert cursor is not None
    cursor.advance(output[:1])
    cursor.draft(16)
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    for token in output[1:]:
        cursor.advance([token])
        cursor.draft(16)
    sys.setprofile(None)
    assert calls / len(output) < 400, "sixteen tokens of a draft, and no more than that many calls each"


def test_text_that_repeats_itself_is_followed_at_few_places() -> None:
    index = ReplayIndex.of({(1,): [[7, 8, 9, 6] * 2000]})
    cursor = index.cursor((1,))
    assert cursor is not None
    cursor.advance([5, 9, 6])
    assert cursor.draft(6) == [7, 8, 9, 6, 7, 8]
    assert len(cursor._positions) <= 64
