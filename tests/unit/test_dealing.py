"""Work dealt out in shares of nearly equal size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specrl.data.dealing import deal_longest_first, deal_near_home


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 8))
def test_every_item_is_dealt_once_and_no_rank_is_overloaded(lengths: list[int], size: int) -> None:
    shares = deal_longest_first(lengths, size)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_a_long_item_is_alone_in_its_share() -> None:
    assert deal_longest_first([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 7)), max_size=40), st.integers(1, 8))
def test_items_leave_their_share_only_where_it_would_be_the_longest(items: list[tuple[int, int]], size: int) -> None:
    lengths, homes = [length for length, _ in items], [home % size for _, home in items]
    shares = deal_near_home(lengths, homes, size)
    assert sorted(i for share in shares for i in share) == list(range(len(items)))
    even = max((sum(lengths[i] for i in share) for share in deal_longest_first(lengths, size)), default=0)
    assert max(sum(lengths[i] for i in share) for share in shares) <= even + max(lengths, default=0)
    at_home = [0] * size
    for length, home in zip(lengths, homes, strict=True):
        at_home[home] += length
    if max(at_home) <= even:
        assert all(homes[i] == share for share, dealt in enumerate(shares) for i in dealt)
