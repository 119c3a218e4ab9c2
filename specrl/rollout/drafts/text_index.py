"""Texts on the device, searched by the last tokens of a response.

All texts form one tensor, and their places are looked up in a sorted tensor of keys, built between generations: a
search takes the same few operations for any number of requests, in time logarithmic in the length of the text.
Keys are 63-bit hashes of tokens; a collision costs a draft, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrl.rollout.drafts.acceptance import CONTINUED_DRAFT, DRAFTER, RECENT, REPLAY

END = -1
"""Marks the start and end of texts, and places of a draft without a token; no token has this id."""
SIZES = (8, 5, 3, 2)
"""The numbers of last tokens by which text is looked up; the first match counts."""
LONGEST = SIZES[0]
STORED, RECENT_TEXT = 0, len(SIZES)
DRAFTERS = RECENT_TEXT + len(SIZES)
CONTINUED = DRAFTERS + 1
"""The kinds of drafts: stored and recent text, by the size found; the drafter's, and the same with text behind it."""
NOTHING = CONTINUED + 1
SOURCES = (REPLAY, RECENT, DRAFTER, CONTINUED_DRAFT)
"""The sources of drafts: stored text, recent text, and the last two kinds."""
ANY_PROMPT = -1
"""Stands for the prompt in the keys of recent text."""
_RANDOM = torch.randint(
    -(2**62), 2**62, (LONGEST + 1 + len(SIZES),), generator=torch.Generator().manual_seed(0)
).tolist()
_OF_PROMPT = _RANDOM[LONGEST]
"""For a multilinear hash: a random number for each of the last tokens, one for the prompt, and one for each size."""
_NO_KEY = torch.iinfo(torch.int64).max
"""Ends every list of keys, so that a search stays inside; no key is this large."""


class Text(NamedTuple):
    """A response to draft from."""

    tokens: Sequence[int] | NDArray[np.int32]
    prompt: int = ANY_PROMPT
    """The number of the prompt whose responses may follow it, or any prompt's."""


class Found(NamedTuple):
    """Text that may continue each request of a batch."""

    places: Tensor
    """[requests, texts] int64, where in `TextIndex.tokens` the text continues; an `END` if there is none."""
    kinds: Tensor
    """[requests, texts] int64; `NOTHING` where there is none."""


def number_of(prompt_tokens: Sequence[int]) -> int:
    """A prompt's number, at least 0: a hash, which like that of a key may collide."""
    return hash(tuple(prompt_tokens)) & 2**62 - 1


class TextIndex:
    """An immutable index of texts."""

    def __init__(self, texts: Sequence[Text], device: torch.device | str = "cpu") -> None:
        """Lay out the texts and index them; of equally common continuations, the earlier text's is used."""
        self.hashing = torch.tensor(_RANDOM, device=device)
        self._factors, self._salts = self.hashing[:LONGEST], self.hashing[LONGEST + 1 :]
        self.last_of_size = torch.tensor(SIZES, device=device) - 1
        self._column = torch.arange(LONGEST, device=device)
        self._firsts = torch.tensor((STORED, RECENT_TEXT), device=device)
        marker = np.full(LONGEST, END, np.int32)
        rows = [np.concatenate((np.asarray(text.tokens, np.int32), marker)) for text in texts]
        self.tokens = torch.from_numpy(np.concatenate((marker, *rows))).to(device)
        sizes = torch.tensor([len(row) for row in rows], dtype=torch.int64, device=device)
        prompts = torch.tensor([text.prompt for text in texts], dtype=torch.int64, device=device)
        self._index_tokens(sizes, prompts)

    def _index_tokens(self, sizes: Tensor, prompts: Tensor) -> None:
        tokens = self.tokens.long()
        owner = torch.repeat_interleave(prompts, sizes)
        owner = torch.cat((owner.new_full((LONGEST,), ANY_PROMPT), owner))
        ahead, before = tokens, torch.cat((tokens.new_full((1,), END), tokens[:-1]))
        is_place = (ahead != END) & (before != END)
        places = is_place.nonzero()[:, 0]
        last = tokens[places[:, None] - 1 - self._column]
        keys = self._keys(last, owner[places])
        # The beginning of a response is matched only with responses stored for its own prompt.
        is_whole = (owner[places] != ANY_PROMPT)[:, None] | (last[:, self.last_of_size] != END)
        self.keys, self.places = _most_common(keys[is_whole], places[:, None].expand_as(keys)[is_whole], tokens)

    def find(self, last: Tensor, prompts: Tensor) -> Found:
        """Find stored and recent text, in this order, by the last tokens, without waiting for the device.

        Args:
            last: [requests, LONGEST] int64, the last tokens of each response, latest first; `END` beyond its start.
            prompts: [requests] int64, the number of each prompt.
        """
        both = torch.stack((prompts, torch.full_like(prompts, ANY_PROMPT)), 1)
        wanted = self._keys(last[:, None], both)  # [requests, stored or recent, sizes]
        at = torch.searchsorted(self.keys, wanted)
        hits = self.keys[at] == wanted
        size = hits.int().argmax(2, keepdim=True)
        is_found = hits.any(2)
        places = torch.where(is_found, self.places[at.gather(2, size)[:, :, 0]], len(self.tokens) - 1)
        return Found(places, torch.where(is_found, size[:, :, 0] + self._firsts, NOTHING))

    def ahead(self, places: Tensor, k: int) -> Tensor:
        """The next `k` tokens at each place, int64 [*places, k], `END` after the end of the text."""
        at = (places[..., None] + torch.arange(k, device=places.device)).clamp(max=len(self.tokens) - 1)
        return until_end(self.tokens[at].long())

    def _keys(self, last: Tensor, prompts: Tensor) -> Tensor:
        sums = (last * self._factors).cumsum(-1)[..., self.last_of_size]  # products and sums wrap around
        return _mixed(sums + (prompts * _OF_PROMPT)[..., None] + self._salts)


def until_end(drafts: Tensor) -> Tensor:
    """Drafts [..., k] with `END` everywhere after their first `END`."""
    return torch.where((drafts != END).int().cumprod(-1).bool(), drafts, END)


def _mixed(keys: Tensor) -> Tensor:
    return (keys ^ (keys >> 29)) >> 1


def _most_common(keys: Tensor, places: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    # By key and next token, and then by place.
    pairs, order = (keys * (_RANDOM[0] | 1) + tokens[places]).sort(stable=True)
    fresh = torch.ones_like(pairs, dtype=torch.bool)
    fresh[1:] = pairs[1:] != pairs[:-1]
    first = fresh.nonzero()[:, 0]
    counts = torch.cat((first[1:], first.new_tensor([len(pairs)]))) - first
    keys, places = keys[order][first], places[order][first]
    # By key; then the most common next token or, at a tie, the one seen first.
    order = (places - (counts << 40)).sort().indices
    order = order[keys[order].sort(stable=True).indices]
    keys, places = keys[order], places[order]
    chosen = torch.ones_like(keys, dtype=torch.bool)
    chosen[1:] = keys[1:] != keys[:-1]
    return torch.cat((keys[chosen], keys.new_tensor([_NO_KEY]))), torch.cat((places[chosen], places.new_zeros(1)))
