from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specrl.training.batches import MicroBatch, TokenSequence, empty_micro_batch, pack


@st.composite
def sequence_lists(draw: st.DrawFn) -> list[TokenSequence]:
    lengths = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), max_size=30))
    return [
        TokenSequence(list(range(1, prompt + response + 1)), prompt, index)
        for index, (prompt, response) in enumerate(lengths)
    ]


def rows(batches: list[MicroBatch]) -> dict[int, tuple[list[int], list[bool], int]]:
    return {
        index: (batch.tokens[row].tolist(), batch.mask[row].tolist(), int(batch.lengths[row]))
        for batch in batches
        for row, index in enumerate(batch.indices)
    }


@given(sequence_lists(), st.integers(1, 200), st.integers(1, 8))
def test_every_sequence_is_in_one_row_with_its_tokens_and_response_mask(
    sequences: list[TokenSequence], budget: int, multiple: int
) -> None:
    found = rows(pack(sequences, budget, multiple))
    assert sorted(found) == [sequence.index for sequence in sequences]
    for sequence in sequences:
        tokens, mask, length = found[sequence.index]
        assert length == len(sequence.tokens)
        assert tokens[:length] == sequence.tokens and not any(tokens[length:])
        expected = [sequence.prompt_length <= i + 1 < length for i in range(len(tokens))]
        assert mask == expected


@given(sequence_lists(), st.integers(1, 200), st.integers(1, 8))
def test_the_padded_area_stays_in_the_budget_unless_one_sequence_exceeds_it(
    sequences: list[TokenSequence], budget: int, multiple: int
) -> None:
    for batch in pack(sequences, budget, multiple):
        assert batch.tokens.shape[1] % multiple == 0
        assert batch.tokens.numel() <= budget or len(batch.indices) == 1
        assert int(batch.lengths.max()) > batch.tokens.shape[1] - multiple


@given(sequence_lists(), st.randoms(use_true_random=False))
def test_packing_does_not_depend_on_the_order_given(sequences: list[TokenSequence], random: object) -> None:
    shuffled = list(sequences)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = pack(sequences, 64), pack(shuffled, 64)
    assert [batch.indices for batch in first] == [batch.indices for batch in second]
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))


def test_similar_lengths_share_a_micro_batch() -> None:
    lengths = [100, 3, 98, 4, 99, 2]
    sequences = [TokenSequence([1] * length, 1, index) for index, length in enumerate(lengths)]
    assert [batch.indices for batch in pack(sequences, 300)] == [[0, 4, 2], [3, 1, 5]]


def test_an_empty_micro_batch_has_nothing_to_train_on() -> None:
    batch = empty_micro_batch(4)
    assert batch.tokens.shape == (1, 4) and batch.num_tokens == 0 and batch.indices == []
    assert pack([], 64) == []


@pytest.mark.parametrize("prompt_length", [0, 4])
def test_a_prompt_that_is_no_part_of_the_sequence_is_refused(prompt_length: int) -> None:
    with pytest.raises(ValueError, match=r"sequence 7: prompt_length"):
        TokenSequence([1, 2, 3], prompt_length, 7)


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pack([TokenSequence([1, 2], 1, 0)], 0)
