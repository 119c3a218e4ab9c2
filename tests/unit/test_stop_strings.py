"""Stop strings are found in the text of tokens, however many tokens come at once."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specrl.config import Config
from specrl.rollout.stop_strings import StopStrings

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGED = ["</", "answer", ">\u010a", "\u010a\u010a", "\u0120Q", "uestion"]
"""Tokens of several characters; byte-level tokenizers write a line feed as \u010a and a space as \u0120."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(["<end>", *ALPHABET, *MERGED])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


def ids(tokenizer: PreTrainedTokenizerFast, *parts: str) -> list[int]:
    found: list[int] = tokenizer.convert_tokens_to_ids(list(parts))
    return found


@pytest.mark.parametrize(
    ("strings", "parts", "kept", "rest"),
    [
        (["</answer>"], ["4", "2", "</", "answer", ">\u010a", "x"], 5, "\n"),
        (["</answer>"], ["</", "answer", "s", ">\u010a"], None, ""),
        (["\n\n"], ["a", "\u010a\u010a", "b"], 2, ""),
        (["\n\n"], ["a", ">\u010a", "\u010a\u010a", "b"], 3, "\n"),
        ([" Question", "</"], ["a", "\u0120Q", "uestion", "</"], 3, ""),
        (["a "], ["a", "\u0120", "b"], 2, ""),
        (["<end>"], ["a", "<end>", "b"], 2, ""),
        (["\u7b54"], ["a", "\u00e7", "\u0143", "\u0136", "b"], 4, ""),  # three tokens for the bytes of a character
        (["nothing"], ["a", "b"], None, ""),
    ],
)
def test_the_first_token_that_completes_a_string_is_the_last(
    tokenizer: PreTrainedTokenizerFast, strings: list[str], parts: list[str], kept: int | None, rest: str
) -> None:
    tokens = ids(tokenizer, *parts)
    stops = StopStrings(tokenizer, strings)
    assert stops.length(tokens, 0) == kept
    one_by_one = (stops.length(tokens[:end], end - 1) for end in range(1, len(tokens) + 1))
    assert next((found for found in one_by_one if found is not None), None) == kept
    assert stops.rest(tokens[:kept]) == rest


def test_strings_are_found_far_into_a_response(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = ids(tokenizer, *["a", "</"] * 5000, "answer", ">\u010a")
    assert StopStrings(tokenizer, ["</answer>"]).length(tokens, 0) == len(tokens)


def test_an_empty_stop_string_is_refused_and_one_with_line_ends_taken() -> None:
    with pytest.raises(ValidationError, match=r"sampling\.stop"):
        Config.model_validate({"name": "x", "sampling": {"stop": [""]}})
    given = ("</answer>", "\nQuestion:", "\n\n")
    assert Config.model_validate({"name": "x", "sampling": {"stop": given}}).sampling.stop == given
