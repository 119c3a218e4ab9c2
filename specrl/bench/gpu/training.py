"""The sections `training` and `drafter` of `specrl bench gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from specrl.bench.gpu.models import Row, Scale, bench_config, forget_memory, least_seconds, memory_beside, write_policy
from specrl.distributed import join, leave
from specrl.models.shapes import model_shape
from specrl.precision import native
from specrl.projection.budgets import rank_of
from specrl.projection.memory import drafter_items, peak_gib, policy_items
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy

LONGER = 8  # the second response's length, as a multiple of the first's
PROMPT_TOKENS = 16
STEPS = 7  # steps of the training-time test, as in the shipped configurations
LR = 1e-4


def measure(scale: Scale, folder: Path) -> Iterator[Row]:
    """Train a random model for a few steps in BF16 and in FP8, on one rank, and compare its memory with the plan.

    A step comprises forward, backward and optimizer; the first one is not counted. Micro-batches have two sizes.
    """
    ranks, length = join(), scale.length
    directory = write_policy(scale.trained, length, folder / "trained")
    tokens = scale.sequences * length
    for micro_batch, fp8 in product((length * 2, length * 8), (False, True)):
        config = bench_config(directory, length, policy={"tokens_per_micro_batch": micro_batch, "recompute": False})
        shape = model_shape(config.model)
        rank = rank_of(config, "train", shape)
        precision = LinearPrecision() if fp8 else None
        if precision is not None and precision.is_native:
            native.set_scales()
        forget_memory()
        policy = Policy(directory, config.policy, dtype="bfloat16", ranks=ranks, seed=0, fp8=precision)
        batches = pack(_sequences(scale), micro_batch, policy.pad_multiple)
        seconds = least_seconds(partial(policy.train_step, batches, mean_loss), scale)
        if precision is not None:
            precision.assert_quantised(trained=True)
        yield {
            "micro_batch": micro_batch,
            "layers": f"fp8, {precision.mode}" if precision is not None else "bf16",
            "step_s": seconds,
            "tokens_per_s": tokens / seconds,
            "tflops": 6 * shape.num_layers * shape.parameters_per_layer * tokens / seconds / 1e12,
            **memory_beside(peak_gib(policy_items(rank, trainable=True, fp8=fp8))),
        }
        del policy
    leave()


def _sequences(scale: Scale) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, scale.trained.vocab_size, (scale.sequences, scale.length), generator=generator).tolist()
    return [TokenSequence(row, max(scale.length // 8, 1), index) for index, row in enumerate(rows)]


def mean_loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    del entropy
    return -logprobs[batch.mask].sum() / max(batch.num_tokens, 1), {}


def measure_drafter(scale: Scale, folder: Path) -> Iterator[Row]:
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
    shape, device = drafter.shape, drafter.ranks.device
    noise = partial(torch.randn, device=device, dtype=shape.dtype)
    column = torch.arange(length, device=device)[None]
    return Features(
        tokens=torch.randint(3, shape.vocab_size, (1, length), device=device),
        mask=(column >= PROMPT_TOKENS) & (column + 1 < length),
        hidden=noise(1, length, len(drafter.feature_layers) * shape.hidden_size),
        target_top1=torch.randint(3, shape.draft_vocab_size, (1, length), device=device),
        starts=torch.zeros(1, dtype=torch.int64, device=device),
    )
