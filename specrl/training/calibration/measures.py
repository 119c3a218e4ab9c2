"""What FP8 does to a policy on its own rollouts: statistics of each linear layer, and the divergence of its output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specrl.distributed import Ranks
from specrl.precision.blocks import ALONG_ROWS
from specrl.training.batches import MicroBatch
from specrl.training.megatron.fp8 import EmulatedLinear, LinearPrecision
from specrl.training.megatron.policy import Policy


@dataclass
class LayerStatistics:
    """Statistics of one layer as sums and maxima over tokens, so that those of several ranks can be combined."""

    error_squares: float = 0.0
    """The sum of (y_fp8 - y_bf16)^2, where both come from the same BF16 input."""
    output_squares: float = 0.0
    amax: float = 0.0
    """The largest magnitude of an input."""
    weight_amax: float = 0.0
    flops_per_token: dict[int, int] = field(default_factory=dict)
    """The FLOPs of the matrix product by tensor-parallel rank, two for each weight; of experts by expert and layer, as
    if tokens were divided evenly among the experts."""

    @property
    def relative_error(self) -> float:
        """|y_fp8 - y_bf16| / |y_bf16|, L2 norms over all tokens; of partial sums where a layer is split by input."""
        return float((self.error_squares / self.output_squares) ** 0.5) if self.output_squares else 0.0

    def add(self, other: LayerStatistics) -> None:
        """Take in the statistics of other tokens, or of another shard, of the same layer."""
        self.error_squares += other.error_squares
        self.output_squares += other.output_squares
        self.amax = max(self.amax, other.amax)
        self.weight_amax = max(self.weight_amax, other.weight_amax)
        self.flops_per_token |= other.flops_per_token


class LayerObserver:
    """Collects the statistics of one layer from the inputs that pass through it."""

    def __init__(self, linear: EmulatedLinear, tp_rank: int) -> None:
        weight: Tensor = linear.module.weight.detach()
        self.linear = linear
        self.statistics = LayerStatistics(weight_amax=float(weight.abs().max()))
        if ".experts." in linear.name:
            _, _, _, expert, own = linear.name.split(".")
            config = linear.module.config
            flops = 2 * weight.numel() * config.moe_router_topk // config.num_moe_experts
            self.statistics.flops_per_token = {2 * int(expert) + (own == "linear_fc2"): flops}
        else:
            self.statistics.flops_per_token = {tp_rank: 2 * weight.numel()}

    @torch.no_grad()
    def observe(self, inputs: Tensor) -> None:
        """Count the inputs [tokens, in], which must be without padding where the layer is not an expert's."""
        if not len(inputs):
            return
        found, linear = self.statistics, self.linear
        plain = inputs @ linear.module.weight.t()
        quantised = linear.quantise(inputs, ALONG_ROWS) @ linear.quantised_weight().t()
        found.error_squares += float((quantised - plain).float().square().sum())
        found.output_squares += float(plain.float().square().sum())
        found.amax = max(found.amax, float(inputs.abs().max()))


@contextmanager
def observing(observers: Iterable[LayerObserver], num_tokens: int) -> Iterator[None]:
    """Let the observers see their layers' inputs inside the block, those of the first `num_tokens` tokens of the row.

    The others only fill it up. Experts get tokens in an order of their own, and their layers see all of them.
    """

    def hook(observer: LayerObserver, args: tuple[Any, ...]) -> None:
        inputs: Tensor = args[0].detach()  # [tokens, 1, in], or [tokens, in] for an expert
        if inputs.dim() == 2:
            observer.observe(inputs)
            return
        observer.observe(observer.linear.whole_row(inputs)[:num_tokens, 0])

    handles = [
        observer.linear.module.register_forward_pre_hook(lambda _, args, observer=observer: hook(observer, args))
        for observer in observers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def merge(parts: Iterable[dict[str, LayerStatistics]]) -> dict[str, LayerStatistics]:
    """The statistics of all ranks by layer: sums over data, unions over tensor and pipeline shards."""
    total: dict[str, LayerStatistics] = {}
    for part in parts:
        for name, statistics in part.items():
            total.setdefault(name, LayerStatistics()).add(statistics)
    return total


class KlDivergence:
    """Measures KL(all BF16 || some layers FP8), a mean over the trained positions of all ranks' micro-batches.

    It compares whole distributions and not sampled tokens, so that a few hundred positions suffice. The BF16 log-probs
    are held in memory: vocabulary x positions x 4 bytes.
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
