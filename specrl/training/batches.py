"""Micro-batches: flat rows of tokens without padding, in which the responses to a prompt share one copy of it.

Each response attends to its prompt and, causally, to itself, as if it alone followed the prompt (Prefix Grouper,
arXiv 2506.05433): log-probs and gradients are those of separate sequences, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_SHARING = 8
"""The most responses that share one copy of a prompt. Attention on GPUs keeps the keys and values of the prompt once
for each of them, so that this bounds its memory; more would save little that eight do not."""


@dataclass(frozen=True)
class TokenSequence:
    tokens: Sequence[int] | NDArray[np.int32]
    prompt_length: int
    """The number of leading tokens that are the prompt, at least 1."""
    index: int
    routes: NDArray[Any] | None = None
    """The experts to which the engine routed each token but the last, [tokens - 1, layers, experts per token]."""
    sampled: NDArray[np.bool_] | None = None
    """For each response token, whether the policy sampled it; None if it sampled all of them."""
    generation_logprobs: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.float32))
    """The engine's log-prob of each sampled token, under the whole distribution; empty without a rollout."""

    @classmethod
    def of(cls, prompt: Sequence[int], response: Sequence[int], index: int) -> TokenSequence:
        return cls([*prompt, *response], len(prompt), index)

    def __post_init__(self) -> None:
        assert 1 <= self.prompt_length <= len(self.tokens), (self.index, self.prompt_length, len(self.tokens))

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True)
class MicroBatch:
    """Sequences in one flat row of tokens.

    A prompt precedes its responses, once for all of them. Tokens that only pad the row to a multiple come last and
    belong to no sequence.
    """

    tokens: Tensor
    """[tokens] int64; 0 in the row's padding."""
    segments: Tensor
    """[segments, 4] int64, in host memory: the places (start, stop, prefix_start, prefix_stop). The tokens from start
    to stop attend causally to each other, and all of them to those of the prefix, which may be empty. Every token is in
    one segment, and segments follow each other."""
    spans: Tensor
    """[sequences, 4] int64, in host memory: the place of the prompt's first token, the length of the prompt, the place
    of the response's first token, the length of the response."""
    predictors: Tensor
    """[n] int64: for each sampled token, sequence by sequence, the place whose output predicts it. The last place of a
    shared prompt is there once for each of its responses."""
    targets: Tensor
    """[n] int64: the sampled tokens, in the same order."""
    mask: Tensor
    """[sequences, most sampled tokens] bool: True for the sampled tokens of each sequence, which stand side by side.
    Log-probs and all that is learned from are in this shape: what an environment wrote has no place in it."""
    sampled: Tensor
    """[response tokens] bool, in host memory: whether the policy sampled each of them, sequence by sequence."""
    num_real: int
    """The number of tokens without padding."""
    indices: list[int]
    """The `TokenSequence.index` of each sequence."""
    routes: list[NDArray[Any]] | None = None
    """The `TokenSequence.routes` of each sequence, in host memory; None if a sequence has none."""

    @property
    def lengths(self) -> Tensor:
        """The length of each sequence, prompt and response, [sequences] int64 in host memory."""
        return self.spans[:, 1] + self.spans[:, 3]

    @property
    def prompt_lengths(self) -> Tensor:
        """The length of each sequence's prompt, [sequences] int64 in host memory."""
        return self.spans[:, 1]

    @property
    def sampled_lengths(self) -> list[int]:
        """The number of sampled tokens of each sequence."""
        return [int(part.sum()) for part in torch.split(self.sampled, self.spans[:, 3].tolist())]

    @property
    def num_tokens(self) -> int:
        return len(self.targets)

    @property
    def num_shared(self) -> int:
        """The number of tokens saved by sharing prompts."""
        return int(self.lengths.sum()) - self.num_real

    def places(self) -> Tensor:
        """The place in the row of each token of each sequence, 0 after its end: [sequences, longest] on the host."""
        prompt, prompt_length, response, _ = (part[:, None] for part in self.spans.unbind(1))
        columns = torch.arange(int(self.lengths.max()) if len(self.spans) else 0)
        found = torch.where(columns < prompt_length, prompt + columns, response + columns - prompt_length)
        return found * (columns < self.lengths[:, None])

    def to(self, device: torch.device) -> MicroBatch:
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "predictors", "targets", "mask")}
        return replace(self, **moved)


def pack(
    sequences: Iterable[TokenSequence],
    tokens_per_micro_batch: int,
    pad_multiple: int = 1,
    *,
    counts_repeated: bool = False,
) -> list[MicroBatch]:
    """Lay sequences out in micro-batches of at most `tokens_per_micro_batch` tokens, or of one sequence.

    Sequences with the same prompt share it, up to `MOST_SHARING` of them that fit together. The longest come first, so
    that memory peaks at the beginning. With `counts_repeated` a shared prompt counts once for each of its responses:
    the drafter takes an optimizer step per micro-batch, which sharing must not make larger.
    """
    room = tokens_per_micro_batch - tokens_per_micro_batch % pad_multiple

    def size(group: list[TokenSequence]) -> int:
        prompts = group[0].prompt_length * (len(group) if counts_repeated else 1)
        return prompts + sum(sequence.response_length for sequence in group)

    def fits(group: list[TokenSequence]) -> bool:
        return size(group) <= room and len(group) <= MOST_SHARING

    groups = [part for group in _by_prompt(sequences) for part in _divided(group, fits)]
    groups.sort(key=lambda group: (-len(group[0].tokens), group[0].index))
    batches: list[list[list[TokenSequence]]] = []
    left = 0
    for group in groups:
        if not batches or size(group) > left:
            batches.append([])
            left = room
        batches[-1].append(group)
        left -= size(group)
    return [_lay_out(batch, pad_multiple) for batch in batches]


def empty_micro_batch(pad_multiple: int = 1) -> MicroBatch:
    """A micro-batch without sequences, with which a rank without work takes part in collective passes."""
    return _lay_out([], pad_multiple)


def _by_prompt(sequences: Iterable[TokenSequence]) -> list[list[TokenSequence]]:
    groups: dict[bytes, list[TokenSequence]] = {}
    for sequence in sequences:
        prompt = np.asarray(sequence.tokens[: sequence.prompt_length], np.int64).tobytes()
        groups.setdefault(prompt, []).append(sequence)
    return [sorted(group, key=lambda item: (-len(item.tokens), item.index)) for group in groups.values()]


def _divided(group: list[TokenSequence], fits: Callable[[list[TokenSequence]], bool]) -> list[list[TokenSequence]]:
    parts: list[list[TokenSequence]] = []
    for sequence in group:
        if not parts or not fits([*parts[-1], sequence]):
            parts.append([])
        parts[-1].append(sequence)
    return parts


def _lay_out(groups: Sequence[list[TokenSequence]], pad_multiple: int) -> MicroBatch:
    parts: list[Tensor] = []
    segments: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    end = 0
    for group in groups:
        start, length = end, group[0].prompt_length
        parts.append(torch.as_tensor(group[0].tokens[:length], dtype=torch.int64))
        end += length
        if len(group) > 1:
            segments.append((start, end, 0, 0))
        for sequence in group:
            response = torch.as_tensor(sequence.tokens[length:], dtype=torch.int64)
            parts.append(response)
            spans.append((start, length, end, len(response)))
            if len(group) == 1:
                segments.append((start, end + len(response), 0, 0))
            elif len(response):
                segments.append((end, end + len(response), start, start + length))
            end += len(response)
    num_real, width = end, max(1, -(-end // pad_multiple)) * pad_multiple
    if width > num_real:
        segments.append((num_real, width, 0, 0))
        parts.append(torch.zeros(width - num_real, dtype=torch.int64))
    sequences = [sequence for group in groups for sequence in group]
    routes = [sequence.routes for sequence in sequences if sequence.routes is not None]
    tokens = torch.cat(parts)
    predictors, targets, mask, sampled = _outputs(torch.tensor(spans, dtype=torch.int64).view(-1, 4), sequences)
    return MicroBatch(
        tokens=tokens,
        segments=torch.tensor(segments, dtype=torch.int64),
        spans=torch.tensor(spans, dtype=torch.int64).view(-1, 4),
        predictors=predictors,
        targets=tokens[targets],
        mask=mask,
        sampled=sampled,
        num_real=num_real,
        indices=[sequence.index for sequence in sequences],
        routes=routes if routes and len(routes) == len(sequences) else None,
    )


def _outputs(spans: Tensor, sequences: Sequence[TokenSequence]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    prompt, prompt_length, response, length = (part[:, None] for part in spans.unbind(1))
    columns = torch.arange(int(length.max()) if len(spans) else 0)
    mask = columns < length
    targets = response + columns
    predictors = torch.where(columns == 0, prompt + prompt_length - 1, targets - 1)
    if all(sequence.sampled is None for sequence in sequences):
        return predictors[mask], targets[mask], mask, torch.ones(int(mask.sum()), dtype=torch.bool)
    written = [item.sampled if item.sampled is not None else np.ones(item.response_length, bool) for item in sequences]
    sampled = torch.from_numpy(np.concatenate(written))
    counts = torch.tensor([int(row.sum()) for row in written])[:, None]
    return predictors[mask][sampled], targets[mask][sampled], torch.arange(int(counts.max())) < counts, sampled


def rows_of(values: Tensor, places: Tensor) -> Tensor:
    """`values[places]`, with a backward pass that adds up the gradients of a row in a fixed order on every device.

    Plain indexing on CPUs and `index_select` on GPUs add up gradients in no fixed order.
    """
    return values[places] if values.is_cuda else values.index_select(0, places)
