"""The section on training: the policy's update in BF16 and in FP8, and the memory it takes against the plan's."""

from __future__ import annotations

import gc
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specrl.bench.gpu.findings import Findings
from specrl.bench.gpu.models import Scale, Shape, bench_config, write_random
from specrl.config import Config
from specrl.distributed import Ranks, join, leave
from specrl.models.shapes import model_shape
from specrl.precision import native
from specrl.projection.budgets import rank_of
from specrl.projection.memory import GIB, HOST_RUNTIME_GIB, peak_gib, policy_items
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy


@dataclass(frozen=True)
class Update:
    """One kind of update, as it was measured."""

    seconds: float
    peak_gib: float
    mode: str
    """How the linear layers computed FP8, or `bf16`."""


def measure(scale: Scale, folder: Path) -> Findings:
    """Train a random model for a few steps in BF16 and in FP8."""
    ranks = join()
    length, shape = scale.length, scale.trained
    directory = write_random(shape, length, folder / "trained")
    micro_batch = min(length * 2, 8192)
    config = bench_config(directory, length, policy={"tokens_per_micro_batch": micro_batch, "recompute": False})
    found = Findings()
    tokens = scale.sequences * length
    flops = 6 * _parameters(shape) * tokens
    found.text.append(
        f"A random model of {_parameters(shape) / 1e9:.2f} G parameters without its embeddings; {scale.sequences} "
        f"sequences of {length} tokens in a step, {micro_batch} tokens in a micro-batch, on one rank with the whole "
        "optimizer. A step is forward, backward and the optimizer's; the first one is not counted. Memory is the "
        + ("device's peak as torch counts it." if ranks.device.type == "cuda" else "process's peak so far.")
    )
    columns = ("linear layers", ">s per step", ">tokens/s", ">TFLOP/s", ">peak GiB", ">planned GiB", ">of plan")
    table = found.table("Policy update", columns)
    for fp8 in (False, True):
        update = _measure_update(directory, config, scale, ranks, fp8=fp8)
        planned = planned_gib(config, fp8=fp8)
        table.add(
            update.mode,
            f"{update.seconds:.2f}",
            f"{tokens / update.seconds:.0f}",
            f"{flops / update.seconds / 1e12:.3g}",
            f"{update.peak_gib:.2f}",
            f"{planned:.2f}",
            f"{update.peak_gib / planned:.0%}",
        )
        found.figures[update.mode] = {
            "seconds": update.seconds,
            "tokens_per_s": tokens / update.seconds,
            "peak_gib": update.peak_gib,
            "planned_gib": planned,
        }
    leave()
    return found


def _measure_update(directory: Path, config: Config, scale: Scale, ranks: Ranks, *, fp8: bool) -> Update:
    precision = LinearPrecision() if fp8 else None
    if precision is not None and precision.is_native:
        native.set_scales(power_of_two=False)
    gc.collect()  # frees the policy before
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    policy = Policy(directory, config.policy, dtype="bfloat16", ranks=ranks, seed=0, fp8=precision)
    batches = pack(_sequences(scale), config.policy.tokens_per_micro_batch, policy.pad_multiple)
    policy.train_step(batches, mean_loss)
    seconds = []
    for _ in range(scale.repeats):
        started = time.perf_counter()
        policy.train_step(batches, mean_loss)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    if precision is not None:
        precision.assert_quantised(trained=True)
    return Update(min(seconds), _peak_gib(ranks), f"fp8, {precision.mode}" if precision is not None else "bf16")


def mean_loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negative mean log-prob of the response tokens."""
    del entropy
    return -logprobs[batch.mask].sum() / max(batch.num_tokens, 1), {}


def planned_gib(config: Config, *, fp8: bool) -> float:
    """Return what the plan counts for a rank that trains this policy and does nothing else."""
    rank = rank_of(config, "train", model_shape(config.model))
    runtime = 0.0 if rank.gpu else HOST_RUNTIME_GIB[0]  # torch does not count the CUDA context in its own peak
    return peak_gib(policy_items(rank, trainable=True, fp8=fp8)) + runtime


def _peak_gib(ranks: Ranks) -> float:
    if ranks.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def _sequences(scale: Scale) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, scale.trained.vocab, (scale.sequences, scale.length), generator=generator).tolist()
    return [TokenSequence(row, max(scale.length // 8, 1), index) for index, row in enumerate(rows)]


def _parameters(shape: Shape) -> int:
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
