"""Scales of an FP8 KV cache, measured in the policy's own forward passes: of rotated queries and keys, and of values.

A token's maximum is its largest magnitude over the heads and channels of one rank. In each layer the 99.9th percentile
of these, plus a margin, is mapped to the largest e4m3 value. They are counted in logarithmic bins, which add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specrl.distributed import Ranks, sum_arrays
from specrl.precision.blocks import E4M3_MAX
from specrl.precision.recipe import KvScales

PERCENTILE = 0.999  # the share of tokens whose maximum does not saturate
MARGIN = 1.05
BINS_PER_OCTAVE, LOWEST_OCTAVE, NUM_OCTAVES = 32, -20, 48
"""The upper edge of a bin is at most 2.2 % above the maxima in it."""


class KvObserver:
    """Watches the attention layers of a policy, which must have it as `policy.kv_observer`."""

    def __init__(self, model: Any, num_layers: int, device: torch.device, *, training_only: bool = True) -> None:
        """Watch this rank's attention layers; with `training_only`, not in passes such as the parity probe's."""
        self.training_only = training_only
        shape = (3, num_layers, BINS_PER_OCTAVE * NUM_OCTAVES)
        self.num_tokens: int | None = None  # the number observed at the start of the row; None if none are
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._hooks: list[Any] = []
        for layer in model.decoder.layers:
            observe = partial(self._observe, layer.layer_number - 1)
            self._hooks.append(layer.self_attention.core_attention.register_forward_pre_hook(observe))

    @contextmanager
    def forward_pass(self, num_tokens: int) -> Iterator[None]:
        """Observe the attention of one micro-batch inside the block, for the first `num_tokens` of its row.

        Recomputation in the backward pass is left out: tokens would count twice, and with pipeline parallelism another
        micro-batch may have passed in between.
        """
        self.num_tokens = num_tokens
        try:
            yield
        finally:
            self.num_tokens = None

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self, ranks: Ranks) -> KvScales | None:
        """The scales for all tokens since the last call, if any (collective)."""
        counts = torch.from_numpy(sum_arrays(ranks, self._counts.cpu().numpy()))
        self._counts.zero_()
        if not bool(counts.sum(-1).all()):
            return None
        return KvScales(*(kv_scale(part).tolist() for part in counts))  # of queries, keys and values

    @torch.no_grad()
    def _observe(self, layer: int, _: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if self.num_tokens is None:
            return
        maxima = torch.stack([part.detach().abs().amax((1, 2, 3)).float() for part in args[:3]])
        bins = ((maxima[:, : self.num_tokens].log2() - LOWEST_OCTAVE) * BINS_PER_OCTAVE).clamp(
            0, self._counts.shape[2] - 1
        )
        ones = torch.ones((), dtype=torch.int64, device=maxima.device)
        self._counts[:, layer].scatter_add_(1, bins.nan_to_num(0).long(), ones.expand(bins.shape))


def kv_scale(counts: Tensor) -> Tensor:
    """The scale of each layer, float64 [layers], from the number of tokens in each bin, [layers, bins]."""
    reached = counts.cumsum(-1) >= PERCENTILE * counts.sum(-1, keepdim=True)
    first = reached.int().argmax(-1)
    return 2.0 ** ((first + 1).double() / BINS_PER_OCTAVE + LOWEST_OCTAVE) * MARGIN / E4M3_MAX
