"""The choice of the linear layers that stay in BF16, so that FP8 changes the policy's output by at most a budget.

All measurements are on rollouts of the policy itself. First, the divergence with each layer alone in FP8, on a small
probe, ranks the layers by nats per FLOP. Then a bisection over this ranking finds the fewest layers in BF16, with all
others in FP8, that meet the budget. Last, the choice is checked on other prompts, and the set grows until it meets the
budget there too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor

from specrl.config import Config
from specrl.distributed import Ranks
from specrl.models.families import Family, expert_shape_of_model
from specrl.models.hf_io import TensorReader
from specrl.precision.kv_scales import KvObserver
from specrl.precision.recipe import KvScales, Recipe
from specrl.schemas import Rollout, write_table
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy

OnProgress = Callable[[int, int, str], None]
"""Called with the number of passes done, their total and the name of the phase."""
GROWTH = 1 / 16
"""The share of all layers by which the set grows while the held-out prompts exceed the budget."""
KL_POSITIONS = 640
"""The number of response tokens, of all ranks, on which the divergence is measured: for the choice, and held out."""
PROBE_POSITIONS, PROBE_SEQUENCES = 64, 2
"""The response tokens and responses passed once per linear layer; the tokens are the responses' beginnings."""


@dataclass(frozen=True)
class LayerRow:
    name: str
    flops_per_token: int
    kl_alone: float
    """The KL divergence of the model's output with only this layer in FP8, in nats per token."""
    precision: str


@dataclass(frozen=True)
class Calibration:
    """The chosen precision of each layer, and the measurements behind it."""

    bf16_layers: list[str]
    kl_all_fp8: float
    """The KL divergence on held-out prompts with every linear layer in FP8, in nats per token."""
    kl_chosen: float
    """The same divergence with `bf16_layers` in BF16."""
    rows: list[LayerRow]
    kv_scales: KvScales | None = None

    @property
    def bf16_flop_fraction(self) -> float:
        kept = sum(row.flops_per_token for row in self.rows if row.precision == "bf16")
        return kept / sum(row.flops_per_token for row in self.rows)


@dataclass(frozen=True)
class CalibrationData:
    """Micro-batches of this data-parallel rank, whose masks say where the divergence is measured."""

    statistics: list[MicroBatch]
    """All of the data, for the scales of the KV cache."""
    probe: list[MicroBatch]
    """A few tokens, which pass through the policy once for every linear layer."""
    selection: list[MicroBatch]
    held_out: list[MicroBatch]
    """The data on which the choice is checked; its prompts are in neither `probe` nor `selection`."""


def calibration_data(
    rollouts: list[Rollout], config: Config, dp_rank: int, dp_size: int, pad_multiple: int = 1
) -> CalibrationData:
    """This data-parallel rank's share of the first `precision.calibration_tokens` tokens of `rollouts`.

    Responses are cut off where a sequence exceeds `precision.calibration_length`. There are at least two prompts,
    whatever the number of tokens, and every second one is held out from the choice of layers.
    """
    shortened = [_shortened(rollout, config.precision.calibration_length) for rollout in rollouts]
    chosen = _within(shortened, config.precision.calibration_tokens, prompts=True, at_least=2)
    prompts = sorted({rollout.prompt_id for rollout in chosen})
    assert len(prompts) > 1, "drafter.num_prompts is 2 or more"
    held = set(prompts[1::2])
    selection = [rollout for rollout in chosen if rollout.prompt_id not in held]
    held_out = [rollout for rollout in chosen if rollout.prompt_id in held]
    first = list({rollout.prompt_id: rollout for rollout in reversed(selection)}.values())[::-1]  # of each prompt

    def batches(items: list[Rollout], longest: int | None = None) -> list[MicroBatch]:
        rows = [(item.prompt_tokens, item.response_tokens[:longest]) for item in items]
        sequences = [TokenSequence.of(*row, index) for index, row in enumerate(rows)]
        return pack(sequences[dp_rank::dp_size], config.policy.tokens_per_micro_batch, pad_multiple)

    return CalibrationData(
        statistics=batches(chosen),
        probe=batches(first[:PROBE_SEQUENCES], PROBE_POSITIONS // PROBE_SEQUENCES),
        selection=batches(_within(selection, KL_POSITIONS, prompts=False), KL_POSITIONS),
        held_out=batches(_within(held_out, KL_POSITIONS, prompts=False), KL_POSITIONS),
    )


def _within(rollouts: list[Rollout], tokens: int, *, prompts: bool, at_least: int = 1) -> list[Rollout]:
    """The leading rollouts that fit into `tokens`; every prompt's first sample precedes any second one."""
    chosen: list[Rollout] = []
    for rollout in sorted(rollouts, key=lambda item: (item.sample, item.step, item.prompt_id)):
        tokens -= len(rollout.response_tokens) + (len(rollout.prompt_tokens) if prompts else 0)
        if tokens < 0 and len(chosen) >= at_least:
            break
        chosen.append(rollout)
    return chosen


def _shortened(rollout: Rollout, length: int) -> Rollout:
    room = max(1, length - len(rollout.prompt_tokens))
    return replace(rollout, response_tokens=rollout.response_tokens[:room])


def calibrate(
    policy: Policy,
    switch: LinearPrecision,
    data: CalibrationData,
    max_kl: float,
    ranks: Ranks,
    on_progress: OnProgress = lambda done, total, phase: None,
    *,
    always_bf16: Sequence[str] = (),
) -> Calibration:
    """Choose the layers that stay in BF16, so that KL(bf16 || fp8) is at most `max_kl` nats per token (collective)."""
    on_progress(0, 1, "scales of the KV cache")
    kv_scales = _measure_kv_scales(policy, switch, data.statistics, ranks)
    flops = flops_per_token(policy)
    names = list(flops)
    alone = _each_alone(KlDivergence(policy, switch, data.probe, ranks), names, on_progress)
    order = sorted(names, key=lambda name: (name not in always_bf16, -alone[name] / flops[name]))

    def search(batches: list[MicroBatch]) -> Callable[[int], float]:
        divergence = KlDivergence(policy, switch, batches, ranks)

        @cache
        def kl_of(count: int) -> float:
            on_progress(kl_of.cache_info().currsize, len(order).bit_length() + 1, "choice of layers")
            return divergence.kl(order[count:]) if count < len(order) else 0.0

        return kl_of

    count = max(len(always_bf16), smallest_prefix(len(order), search(data.selection), max_kl))
    held_out = search(data.held_out)
    count = grown_prefix(count, len(order), held_out, max_kl)
    switch.set_fp8(names)
    kept = set(order[:count])
    return Calibration(
        bf16_layers=[name for name in names if name in kept],
        kl_all_fp8=held_out(0),
        kl_chosen=held_out(count),
        rows=[
            LayerRow(
                name=name,
                flops_per_token=flops[name],
                kl_alone=alone[name],
                precision="bf16" if name in kept else "fp8",
            )
            for name in names
        ],
        kv_scales=kv_scales,
    )


def _measure_kv_scales(
    policy: Policy, switch: LinearPrecision, batches: list[MicroBatch], ranks: Ranks
) -> KvScales | None:
    switch.set_fp8([])
    observer = KvObserver(policy.model, policy.hf_config.num_hidden_layers, ranks.device, training_only=False)
    policy.kv_observer = observer
    policy.logprobs(batches)
    policy.kv_observer = None
    observer.detach()
    return observer.take(ranks)


def smallest_prefix(size: int, kl_of: Callable[[int], float], budget: float) -> int:
    """Find by bisection the smallest number of leading layers in BF16 that meets the budget; all `size` of them do."""
    return bisect_left(range(size), True, key=lambda count: kl_of(count) <= budget)


def grown_prefix(count: int, size: int, kl_of: Callable[[int], float], budget: float) -> int:
    """`count`, or the larger number of layers needed to meet the budget on the data of `kl_of`."""
    while count < size and not kl_of(count) <= budget:  # NaN meets no budget
        count = min(size, count + max(1, round(GROWTH * size)))
    return count


def _each_alone(divergence: KlDivergence, names: list[str], on_progress: OnProgress) -> dict[str, float]:
    found = {}
    for done, name in enumerate(names):
        on_progress(done, len(names), "layers one by one")
        kl = divergence.kl([name])
        found[name] = math.inf if math.isnan(kl) else kl  # such a layer stays in BF16 first
    return found


def recipe_from(calibration: Calibration, family: Family, num_layers: int) -> Recipe:
    return Recipe(
        family=family,
        num_layers=num_layers,
        bf16_layers=frozenset(calibration.bf16_layers),
        kv_scales=calibration.kv_scales,
    )


def write_layers(path: Path, rows: list[LayerRow]) -> None:
    write_table(path, pa.Table.from_pylist([asdict(row) for row in rows]))


def flops_per_token(policy: Policy) -> dict[str, int]:
    """The FLOPs of each linear layer, two per weight; of the experts, only those that a token is routed to count."""
    reader, experts = TensorReader(policy.model_dir), expert_shape_of_model(policy.hf_config)
    flops: dict[str, int] = {}
    for linear in policy.family.linears:
        shapes = [reader.shape(f"model.layers.0.{part.format(expert=0)}.weight") for part in linear.parts]
        times = experts.per_token if experts is not None and linear.is_expert else 1
        flops[linear.name] = flops.get(linear.name, 0) + 2 * times * sum(map(prod, shapes))
    layers = range(policy.hf_config.num_hidden_layers)
    return {f"layers.{layer}.{name}": flops[name] for layer in layers for name in sorted(flops)}


class KlDivergence:
    """Measures KL(all BF16 || some layers FP8), averaged over the trained positions of all ranks' micro-batches.

    It compares whole distributions and not sampled tokens, so that a few hundred positions suffice. The BF16 log-probs
    are kept in memory: vocabulary x positions x 4 bytes.
    """

    def __init__(self, policy: Policy, switch: LinearPrecision, batches: list[MicroBatch], ranks: Ranks) -> None:
        self._policy, self._switch, self._ranks = policy, switch, ranks
        batches = self._batches = policy.evenly_many(batches)
        switch.set_fp8([])
        self._references = [self._logprobs(batch) for batch in batches]
        self._num_positions = sum(ranks.gather(self._own(sum(batch.num_tokens for batch in batches))))
        if not self._num_positions:
            raise ValueError("no response tokens to calibrate on: give precision.calibration_tokens room for some")

    def kl(self, fp8_layers: Sequence[str]) -> float:
        """The divergence in nats per token with exactly these layers in FP8 (collective)."""
        self._switch.set_fp8(fp8_layers)
        total = 0.0
        for batch, reference in zip(self._batches, self._references, strict=True):
            logprobs = self._logprobs(batch)
            if logprobs is not None and reference is not None:
                total += float((reference.exp() * (reference - logprobs)).sum(dtype=torch.float64))
        return sum(self._ranks.gather(total)) / self._num_positions

    def _own(self, value: int) -> int:
        return value if self._policy.tp_rank == 0 and self._policy.pp_rank == 0 else 0

    def _logprobs(self, batch: MicroBatch) -> Tensor | None:
        model = self._policy.model
        with _output(model) as seen:
            self._policy.logprobs([batch])
        if not seen:
            return None
        logits = torch.cat(seen).flatten(0, -2)
        first = self._policy.tp_rank * logits.shape[1]
        logits = logits[:, : max(0, self._policy.vocab_size - first)]
        return _log_softmax(logits, model.output_layer.tp_group)


@contextmanager
def _output(model: Any) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    if not model.post_process:
        yield seen
        return
    handle = model.output_layer.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    try:
        yield seen
    finally:
        handle.remove()


def _log_softmax(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return logits.float().log_softmax(1)
    values = logits.float()
    peak = values.amax(1)
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    total = (values - peak[:, None]).exp().sum(1)
    dist.all_reduce(total, group=group)
    return values - (peak + total.log())[:, None]
