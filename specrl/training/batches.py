"""Micro-batches by length: sequences of similar length share one, so that little is padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and its response."""

    tokens: Sequence[int] | NDArray[np.int32]
    """Prompt, then response."""
    prompt_length: int
    """The number of leading tokens that are the prompt, at least 1."""
    index: int
    """The position in the caller's list."""
    routes: NDArray[Any] | None = None
    """The experts that the engine sent each token but the last to, [tokens - 1, layers, experts per token]."""

    @classmethod
    def of(cls, prompt: Sequence[int], response: Sequence[int], index: int) -> TokenSequence:
        """Return the sequence of a prompt's tokens and its response's."""
        return cls([*prompt, *response], len(prompt), index)

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_length <= len(self.tokens):
            raise ValueError(
                f"sequence {self.index}: prompt_length = {self.prompt_length} must lie in 1..{len(self.tokens)}, "
                "the number of tokens"
            )


@dataclass(frozen=True)
class MicroBatch:
    """Sequences padded on the right to the longest of them."""

    tokens: Tensor
    """[batch, seq] int64; 0 where padded."""
    mask: Tensor
    """[batch, seq] bool: True at [b, i] where `tokens[b, i + 1]` is a response token, so that the policy's output at i
    is trained on. The last column is always False."""
    lengths: Tensor
    """[batch] int64: the length of each sequence without padding."""
    indices: list[int]
    """The `TokenSequence.index` of each row."""
    routes: list[NDArray[Any]] | None = None
    """The `TokenSequence.routes` of each row, in host memory; None where a row has none."""

    @property
    def area(self) -> int:
        """The number of tokens, padding included."""
        return self.tokens.numel()

    @property
    def num_tokens(self) -> int:
        """The number of response tokens to train on."""
        return int(self.mask.sum())

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch on another device."""
        return replace(self, tokens=self.tokens.to(device), mask=self.mask.to(device), lengths=self.lengths.to(device))


def pack(sequences: Iterable[TokenSequence], tokens_per_micro_batch: int, pad_multiple: int = 1) -> list[MicroBatch]:
    """Sort sequences by length, longest first, and cut them into micro-batches.

    Each holds as many sequences as fit a padded area of `tokens_per_micro_batch`, and at least one. The same sequences
    give the same micro-batches. The longest come first, so that memory peaks at the beginning.

    Args:
        pad_multiple: The padded length of every micro-batch is a multiple of it.

    Raises:
        ValueError: One of the two numbers is below 1.
    """
    if tokens_per_micro_batch < 1 or pad_multiple < 1:
        raise ValueError(
            f"tokens_per_micro_batch = {tokens_per_micro_batch} and pad_multiple = {pad_multiple} must be at least 1"
        )
    rows: list[TokenSequence] = []
    batches: list[MicroBatch] = []
    width = 0
    for sequence in sorted(sequences, key=lambda item: (-len(item.tokens), item.index)):
        if rows and (len(rows) + 1) * width > tokens_per_micro_batch:
            batches.append(_pad(rows, width))
            rows = []
        if not rows:
            width = -(-len(sequence.tokens) // pad_multiple) * pad_multiple
        rows.append(sequence)
    if rows:
        batches.append(_pad(rows, width))
    return batches


def empty_micro_batch(pad_multiple: int = 1) -> MicroBatch:
    """Return a micro-batch without a sequence, with which a rank without work takes part in collective passes."""
    return MicroBatch(
        tokens=torch.zeros(1, pad_multiple, dtype=torch.int64),
        mask=torch.zeros(1, pad_multiple, dtype=torch.bool),
        lengths=torch.zeros(1, dtype=torch.int64),
        indices=[],
    )


def _pad(rows: list[TokenSequence], width: int) -> MicroBatch:
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, sequence in enumerate(rows):
        length = len(sequence.tokens)
        tokens[row, :length] = torch.as_tensor(sequence.tokens)
        mask[row, sequence.prompt_length - 1 : length - 1] = True
    lengths = torch.tensor([len(sequence.tokens) for sequence in rows])
    routes = [sequence.routes for sequence in rows if sequence.routes is not None]
    indices = [sequence.index for sequence in rows]
    return MicroBatch(tokens, mask, lengths, indices, routes if len(routes) == len(rows) else None)
