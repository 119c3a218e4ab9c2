from __future__ import annotations

import pytest
import torch

from specrl.config import ConfigError, parse_config
from specrl.data.prompts import PromptSource
from specrl.models.tiny import character_tokenizer
from specrl.training.batches import TokenSequence, pack
from specrl.training.warm_start import (
    FINAL_LR_FRACTION,
    cross_entropy,
    demonstration_sequences,
    make_batches,
    schedule,
)


def sequences_for(max_response_tokens: int = 160) -> tuple[list[TokenSequence], PromptSource]:
    config = parse_config(
        {
            "name": "test",
            "model": {"source": "tiny", "max_length": 512},
            "sampling": {"max_response_tokens": max_response_tokens},
            "warm_start": {"num_examples": 100},
        }
    )
    source = PromptSource(config, character_tokenizer(512))
    return demonstration_sequences(source, config), source


def test_each_sequence_is_prompt_then_response_then_end() -> None:
    sequences, source = sequences_for()
    tokenizer = source.tokenizer
    for sequence in sequences:
        assert sequence.tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(sequence.tokens[: sequence.prompt_length]).endswith("\nA:")
        assert tokenizer.decode(sequence.tokens[sequence.prompt_length : -1]).startswith(" ")


def test_demonstrations_that_sampling_would_cut_off_are_left_out() -> None:
    sequences, _ = sequences_for(max_response_tokens=60)
    assert 0 < len(sequences) < 100
    assert max(len(sequence.tokens) - sequence.prompt_length for sequence in sequences) <= 60


def test_a_limit_that_leaves_no_demonstration_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^sampling\.max_response_tokens = 1 leaves none of the 100 demonstrations"):
        sequences_for(max_response_tokens=1)


def test_batches_hold_sequences_of_similar_length_and_each_sequence_once() -> None:
    sequences, _ = sequences_for()
    batches = make_batches(sequences, 8, seed=3)
    assert sorted(sequence.index for batch in batches for sequence in batch) == list(range(len(sequences)))
    padded = sum(max(len(sequence.tokens) for sequence in batch) * len(batch) for batch in batches)
    assert padded < 1.2 * sum(len(sequence.tokens) for sequence in sequences)
    assert batches == make_batches(sequences, 8, seed=3) != make_batches(sequences, 8, seed=4)


@pytest.mark.parametrize("steps", [1, 2, 50, 400])
def test_the_learning_rate_rises_then_falls(steps: int) -> None:
    factors = [schedule(step, steps) for step in range(steps)]
    peak = factors.index(max(factors))
    assert peak <= max(0, round(steps * 0.1) - 1)
    rising, falling = factors[: peak + 1], factors[peak:]
    assert rising == sorted(rising) and len(set(rising)) == len(rising)
    assert falling == sorted(falling, reverse=True) and len(set(falling)) == len(falling)
    assert all(FINAL_LR_FRACTION <= factor <= 1 for factor in factors[peak:])


def test_micro_batch_losses_add_up_to_the_mean_over_response_tokens() -> None:
    sequences, _ = sequences_for()
    batch = sequences[:8]
    num_tokens = sum(len(sequence.tokens) - sequence.prompt_length for sequence in batch)
    loss = cross_entropy(num_tokens)
    total = torch.zeros(())
    for micro_batch in pack(batch, 256):
        logprobs = torch.full(micro_batch.mask.shape, -2.0)
        total += loss(logprobs, logprobs, micro_batch)[0]
    assert total.item() == pytest.approx(2.0)
