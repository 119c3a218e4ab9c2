"""The section `drafter` of `specrl bench gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from specrl.bench.gpu.models import Row, Scale, bench_config, forget_memory, least_seconds, memory_beside, write_policy
from specrl.distributed import join, leave
from specrl.models.shapes import model_shape
from specrl.projection.budgets import rank_of
from specrl.projection.memory import drafter_items, peak_gib
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features

LONGER = 8  # the second response's length, as a multiple of the first's
PROMPT_TOKENS = 16
STEPS = 7  # steps of the training-time test, as in the shipped configurations
LR = 1e-4


def measure(scale: Scale, folder: Path) -> Iterator[Row]:
    """Train a new EAGLE-3 drafter on one synthetic response, short or long, and compare its memory with the plan.

    The first step is not counted. With flash attention, the time per token grows little with the length.
    """
    ranks, longest = join(), LONGER * scale.length
    policy = write_policy(scale.trained, longest, folder / "drafted-for")
    tokens = torch.arange(min(scale.draft_vocab, scale.trained.vocab_size))
    for length in (scale.length, longest):
        config = bench_config(policy, length, drafter={"draft_vocab_size": len(tokens), "ttt_steps": STEPS})
        rank = rank_of(config, "train", model_shape(config.model))
        forget_memory()
        drafter = Drafter.create(policy, config.drafter, tokens, ranks)
        features = _features(drafter, length)
        step = least_seconds(partial(drafter.update, [features], lr=LR), scale)
        planned = peak_gib(drafter_items(rank, responses=1))
        yield {"tokens": length, "step_s": step, "tokens_per_s": length / step, **memory_beside(planned)}
        del drafter, features
    leave()


def _features(drafter: Drafter, length: int) -> Features:
    shape, spec, device = drafter.shape, drafter.feature_spec, drafter.ranks.device
    size = shape.hidden_size if spec.as_hidden else shape.draft_vocab_size
    noise = partial(torch.randn, device=device, dtype=shape.dtype)
    column = torch.arange(length, device=device)[None]
    return Features(
        tokens=torch.randint(3, shape.vocab_size, (1, length), device=device),
        mask=(column >= PROMPT_TOKENS) & (column + 1 < length),
        hidden=noise(1, length, len(spec.layers) * shape.hidden_size),
        targets=noise(1, length, size),
        target_top1=torch.randint(3, shape.draft_vocab_size, (1, length), device=device),
        head=noise(shape.draft_vocab_size, shape.hidden_size) if spec.as_hidden else None,
    )
