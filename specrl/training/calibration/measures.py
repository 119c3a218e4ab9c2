"""What FP8 does to the output of a policy on its own rollouts, and what it saves in each linear layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specrl.distributed import Ranks
from specrl.models.families import expert_shape_of_model
from specrl.models.hf_io import TensorReader
from specrl.training.batches import MicroBatch
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy


def flops_per_token(policy: Policy) -> dict[str, int]:
    """The FLOPs of each linear layer, two for each weight; of experts, those of the experts that a token goes to."""
    reader, experts = TensorReader(policy.model_dir), expert_shape_of_model(policy.hf_config)
    flops: dict[str, int] = {}
    for linear in policy.family.linears:
        shapes = [reader.shape(f"model.layers.0.{part.format(expert=0)}.weight") for part in linear.parts]
        times = experts.per_token if experts is not None and linear.is_expert else 1
        flops[linear.name] = flops.get(linear.name, 0) + 2 * times * sum(map(prod, shapes))
    layers = range(policy.hf_config.num_hidden_layers)
    return {f"layers.{layer}.{name}": flops[name] for layer in layers for name in sorted(flops)}


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
