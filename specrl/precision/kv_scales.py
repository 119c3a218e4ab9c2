"""Scales of an FP8 KV cache from the policy's own forward passes: queries and keys after their rotation, and values.

Per layer, the 99.9th percentile over tokens of the largest magnitude of a token (over its heads and channels of one
tensor-parallel rank), with a margin, is what the largest e4m3 value stands for; the few larger magnitudes saturate.
Maxima are counted in bins by their logarithm, so that ranks and micro-batches add up and a step costs little.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specrl.distributed import Ranks
from specrl.precision.blocks import E4M3_MAX
from specrl.precision.recipe import KvScales

PERCENTILE, MARGIN = 0.999, 1.05
BINS_PER_OCTAVE, LOWEST_OCTAVE, NUM_OCTAVES = 32, -20, 48
"""Upper edges of bins are at most 2.2 % above what lies in them."""
QUERY, KEY, VALUE = range(3)


class KvObserver:
    """Watches the attention layers of a policy: hand it to the policy as `policy.kv_observer`."""

    def __init__(self, model: Any, num_layers: int, device: torch.device, *, training_only: bool = True) -> None:
        """Watch the attention layers of a model.

        Args:
            training_only: leave out passes that do not train: the parity probe's and those of reference weights.
        """
        self.training_only = training_only
        shape = (3, num_layers, BINS_PER_OCTAVE * NUM_OCTAVES)
        self.lengths: Tensor | None = None
        """Set by the policy before each micro-batch: [batch], so that padding is left out; none: look away."""
        self.seconds = 0.0
        """Spent here since the last `take`; on GPUs the time to launch it."""
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._watched = [layer.self_attention.core_attention for layer in model.decoder.layers]
        self._hooks: list[Any] = []
        for layer, attention in zip(model.decoder.layers, self._watched, strict=True):
            observe = partial(self._observe, layer.layer_number - 1)
            if hasattr(attention, "observe"):
                attention.observe = observe  # rotates by itself, and shows what it has rotated
            else:
                self._hooks.append(attention.register_forward_pre_hook(partial(_before_attention, observe)))

    def detach(self) -> None:
        """Stop watching."""
        for attention in self._watched:
            if hasattr(attention, "observe"):
                attention.observe = None
        for hook in self._hooks:
            hook.remove()

    def take(self, ranks: Ranks) -> tuple[KvScales, float] | None:
        """*Return the scales for all tokens of all ranks since the last call, and the seconds that measuring took.

        Returns:
            None where there was no token.
        """
        started = time.perf_counter()
        if ranks.world_size > 1:
            dist.all_reduce(self._counts)
        counts = self._counts.to("cpu", copy=True)
        self._counts.zero_()
        seconds, self.seconds = self.seconds, 0.0
        if not bool(counts.sum(-1).all()):
            return None
        q, k, v = (kv_scale(counts[which]).tolist() for which in (QUERY, KEY, VALUE))
        return KvScales(q, k, v), seconds + time.perf_counter() - started

    @torch.no_grad()
    def _observe(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Count the maxima of queries, keys and values, [batch, heads, seq, width] each."""
        if self.lengths is None:
            return
        started = time.perf_counter()
        inside = torch.arange(query.shape[2], device=query.device) < self.lengths[:, None]
        maxima = torch.stack([part.detach().abs().amax((1, 3)).float() for part in (query, key, value)])
        bins = ((maxima[:, inside].log2() - LOWEST_OCTAVE) * BINS_PER_OCTAVE).clamp(0, self._counts.shape[2] - 1)
        ones = torch.ones((), dtype=torch.int64, device=query.device)
        self._counts[:, layer].scatter_add_(1, bins.nan_to_num(0).long(), ones.expand(bins.shape))
        self.seconds += time.perf_counter() - started


def kv_scale(counts: Tensor) -> Tensor:
    """Return the scales [layers], float64, for counts of tokens [layers, bins]."""
    reached = counts.cumsum(-1) >= PERCENTILE * counts.sum(-1, keepdim=True)
    first = reached.int().argmax(-1)
    return 2.0 ** ((first + 1).double() / BINS_PER_OCTAVE + LOWEST_OCTAVE) * MARGIN / E4M3_MAX


def _before_attention(observe: Any, module: Any, args: tuple[Any, ...]) -> None:
    """Observe attention that gets queries and keys already rotated, [seq, batch, heads, width]."""
    query, key, value = (part.permute(1, 2, 0, 3) for part in args[:3])
    observe(query, key, value)
