from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specrl.training.batches import MicroBatch, TokenSequence, empty_micro_batch, pack


@st.composite
def sequence_lists(draw: st.DrawFn) -> list[TokenSequence]:
    """Sequences of a few prompts, each with any number of responses, some of them empty."""
    groups = draw(st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 30), max_size=6)), max_size=8))
    sequences: list[TokenSequence] = []
    for number, (length, responses) in enumerate(groups):
        prompt = [1000 * number + place for place in range(length)]
        for response in responses:
            tokens = [10_000 * (len(sequences) + 1) + place for place in range(response)]
            sequences.append(TokenSequence.of(prompt, tokens, len(sequences)))
    return sequences


def size_of(sequences: list[TokenSequence], batch: MicroBatch) -> int:
    """The tokens of a micro-batch's sequences with each prompt once."""
    chosen = [sequences[index] for index in batch.indices]
    prompts = {tuple(item.tokens[: item.prompt_length]) for item in chosen}
    return sum(map(len, prompts)) + sum(item.response_length for item in chosen)


@settings(deadline=None)
@given(sequence_lists(), st.integers(1, 200), st.integers(1, 8))
def test_every_sequence_is_in_one_row_with_its_tokens_and_what_predicts_them(
    sequences: list[TokenSequence], budget: int, multiple: int
) -> None:
    batches = pack(sequences, budget, multiple)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(sequences)))
    for batch in batches:
        at = 0
        for places, index, mask in zip(batch.places(), batch.indices, batch.mask, strict=True):
            item = sequences[index]
            own = places[: len(item.tokens)]
            assert batch.tokens[own].tolist() == item.tokens
            response = slice(at, at + item.response_length)
            assert batch.targets[response].tolist() == item.tokens[item.prompt_length :]
            assert torch.equal(batch.predictors[response], own[item.prompt_length - 1 : -1])
            assert mask.tolist() == [column < item.response_length for column in range(len(mask))]
            at += item.response_length
        assert at == batch.num_tokens == len(batch.predictors)


@settings(deadline=None)
@given(sequence_lists(), st.integers(1, 200), st.integers(1, 8))
def test_every_token_sees_its_own_sequence_up_to_itself_and_nothing_else(
    sequences: list[TokenSequence], budget: int, multiple: int
) -> None:
    for batch in pack(sequences, budget, multiple):
        width = len(batch.tokens)
        seen = torch.zeros(width, width, dtype=torch.bool)
        end = 0
        for start, stop, prefix_start, prefix_stop in batch.segments.tolist():
            assert start == end and stop > start
            seen[start:stop, prefix_start:prefix_stop] = True
            seen[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril().bool()
            end = stop
        assert end == width
        expected = torch.zeros_like(seen)
        for places, length in zip(batch.places(), batch.lengths.tolist(), strict=True):
            for column, place in enumerate(places[:length].tolist()):
                expected[place, places[: column + 1]] = True
        assert torch.equal(seen[: batch.num_real, : batch.num_real], expected[: batch.num_real, : batch.num_real])
        assert not seen[: batch.num_real, batch.num_real :].any() and not seen[batch.num_real :, : batch.num_real].any()


@settings(deadline=None)
@given(sequence_lists(), st.integers(1, 200), st.integers(1, 8))
def test_a_prompt_is_there_once_and_rows_are_filled_up_at_their_end_alone(
    sequences: list[TokenSequence], budget: int, multiple: int
) -> None:
    for batch in pack(sequences, budget, multiple):
        assert batch.num_real == size_of(sequences, batch)
        assert batch.num_shared == sum(len(sequences[index].tokens) for index in batch.indices) - batch.num_real
        assert len(batch.tokens) % multiple == 0 and len(batch.tokens) - batch.num_real < multiple
        assert len(batch.tokens) <= budget or len(batch.indices) == 1
        assert not batch.tokens[batch.num_real :].any()


@settings(deadline=None)
@given(sequence_lists(), st.randoms(use_true_random=False))
def test_packing_does_not_depend_on_the_order_given(sequences: list[TokenSequence], random: object) -> None:
    shuffled = list(sequences)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = pack(sequences, 64), pack(shuffled, 64)
    assert [batch.indices for batch in first] == [batch.indices for batch in second]
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))


def test_similar_lengths_share_a_micro_batch() -> None:
    lengths = [100, 3, 98, 4, 99, 2]
    sequences = [TokenSequence([index] * length, 1, index) for index, length in enumerate(lengths)]
    assert [batch.indices for batch in pack(sequences, 300)] == [[0, 4, 2], [3, 1, 5]]


def test_a_group_that_does_not_fit_is_divided_and_its_prompt_repeated() -> None:
    sequences = [TokenSequence.of([7] * 20, [index] * 10, index) for index in range(5)]
    batches = pack(sequences, 45)
    assert [batch.indices for batch in batches] == [[0, 1], [2, 3], [4]]
    assert [len(batch.tokens) for batch in batches] == [40, 40, 30]
    repeated = pack(sequences, 90, counts_repeated=True)
    assert [batch.indices for batch in repeated] == [[0, 1, 2], [3, 4]]
    assert [len(batch.tokens) for batch in repeated] == [50, 40]


def test_an_empty_micro_batch_has_nothing_to_train_on() -> None:
    batch = empty_micro_batch(4)
    assert len(batch.tokens) == 4 and batch.num_tokens == 0 and batch.indices == [] and batch.num_real == 0
    assert pack([], 64) == []


@pytest.mark.parametrize("prompt_length", [0, 4])
def test_a_prompt_that_is_no_part_of_the_sequence_is_refused(prompt_length: int) -> None:
    with pytest.raises(AssertionError, match=f"7, {prompt_length}, 3"):
        TokenSequence([1, 2, 3], prompt_length, 7)


def test_at_most_eight_responses_share_a_prompt() -> None:
    """Attention on GPUs keeps the prompt's keys and values once for each of them."""
    batches = pack([TokenSequence.of([1, 2, 3], [4 + i], i) for i in range(20)], 10_000)
    copies = [int((batch.spans[:, 0] == start).sum()) for batch in batches for start in batch.spans[:, 0].unique()]
    assert sorted(copies) == [4, 8, 8]
