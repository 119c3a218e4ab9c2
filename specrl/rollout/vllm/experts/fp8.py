"""Experts in FP8 inside vLLM: emulated on CPUs, and judged where vLLM computes them natively on GPUs.

vLLM's kernels for experts on a CPU compute both products in one call, without a place in between at which activations
could be rounded. So the emulation computes expert after expert.
"""

from __future__ import annotations

from typing import Any

import specrl.rollout.vllm.cpu_kernels  # noqa: F401  (must precede vllm)

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from specrl.precision.blocks import ALONG_ROWS, SQUARE, fake_quantise, fake_quantise_rows

NATIVE_METHOD = "Fp8PerBlockOnlineMoEMethod"
WEIGHT_ONLY = ("MARLIN", "HUMMING", "CPU", "EMULATION")
"""The kernels for experts, as vLLM names them, that keep activations in BF16 or may do so."""
ROWS_TOGETHER = 16
"""Inputs of an expert are filled up to a multiple of this many rows: with only a few, the product of a row would take
another kernel, whose last bits differ, and would depend on how many other tokens chose the same expert."""


class EmulatedFp8Experts(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """The experts of one layer of the policy in emulated FP8."""

    def __init__(self, moe: Any, power_of_two: bool) -> None:
        super().__init__(moe)
        self.power_of_two = power_of_two
        self.num_weight_quantisations = 0
        self.num_activation_quantisations = 0

    @property
    def is_monolithic(self) -> bool:
        """Whether the kernel chooses the experts by itself; here the model's router does."""
        return False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Round the weights of this rank, at the start and at every refit; no kernel packs them."""
        width = layer.w2_weight.shape[2]
        for w13, w2 in zip(layer.w13_weight.data, layer.w2_weight.data, strict=True):
            w13.copy_(fake_quantise_rows(w13, (width, width), power_of_two=self.power_of_two))
            w2.copy_(self.quantise_matrix(w2))
        self.num_weight_quantisations += 1

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Sum each token's experts: [tokens, hidden] -> the same; with tensor parallelism, this rank's part of it."""
        assert shared_experts is None and layer.expert_map is None
        self.num_activation_quantisations += 1
        inputs = self.quantise_inputs(x)
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
            gates = topk_weights[tokens, places, None]
            total[tokens] += self._expert(layer, expert, inputs[tokens], gates)[: len(tokens)].float()
        return total.to(x.dtype)

    def _expert(self, layer: Any, expert: int, inputs: Tensor, gates: Tensor) -> Tensor:
        """One expert's weighted outputs [rows, hidden] for rounded inputs and their weights; rows are added.

        As in the trainer, inner activations are weighted before they are rounded.
        """
        more = -len(inputs) % ROWS_TOGETHER
        fused = F.linear(F.pad(inputs, (0, 0, 0, more)), layer.w13_weight[expert])
        gate, up = fused.chunk(2, -1)
        inner = (F.silu(gate) * up * F.pad(gates, (0, 0, 0, more))).to(inputs.dtype)
        return F.linear(self.quantise_inputs(inner), layer.w2_weight[expert])

    def quantise_matrix(self, matrix: Tensor) -> Tensor:
        """Round one matrix of an expert, or this rank's part of it: [out, in]."""
        return fake_quantise(matrix, SQUARE, power_of_two=self.power_of_two)

    def quantise_inputs(self, x: Tensor) -> Tensor:
        """Round inputs [tokens, in], each row by itself."""
        return fake_quantise(x, ALONG_ROWS, power_of_two=self.power_of_two)


def native_flaw(layer: Any) -> str | None:
    """Why experts for which vLLM was asked for native FP8 do not compute in it; None if they do."""
    backend = layer.quant_method.fp8_backend.name
    if backend in WEIGHT_ONLY:
        return f"computes with {backend}: its activations are not in FP8"
    wrong = [weight.dtype for weight in (layer.w13_weight, layer.w2_weight) if weight.dtype != torch.float8_e4m3fn]
    return f"holds weights of {wrong[0]}, not in FP8" if wrong else None
