"""FP8 inside vLLM on CPUs, emulated through its registry of quantisation methods.

It rounds weights once per (re)load and activations before every product, with the functions of the trainer's
emulation; linear layers use vLLM's own product of weights and activations in the compute type. vLLM's CPU kernels for
experts compute both products in one call, which leaves no place to round the activations in between, so the emulation
computes one expert after another. Only the policy's layers named by the recipe are touched: head, embeddings, norms,
routers and any drafter stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from specrl.precision.blocks import ALONG_ROWS, SQUARE, fake_quantise

EMULATION = "specrl_fp8"
ROWS_TOGETHER = 16
"""Inputs of an expert are filled up to a multiple of this many rows: with only a few, the product of a row would take
another kernel, whose last bits differ, and would depend on how many other tokens chose the same expert."""


@register_quantization_config(EMULATION)
class EmulatedFp8Config(QuantizationConfig):  # type: ignore[misc]
    """Chooses the emulated layers. vLLM creates it from `quantization_config`."""

    def __init__(self, layers: frozenset[str]) -> None:
        super().__init__()
        self.layers = layers

    @classmethod
    def get_name(cls) -> str:
        return EMULATION

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EmulatedFp8Config:
        return cls(frozenset(config["layers"]))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            return EmulatedFp8Linear() if prefix in self.layers else UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts) and prefix in self.layers:
            return EmulatedFp8Experts(layer.moe_config)
        return None  # head, embeddings and attention stay as in vLLM


class _Emulated:
    def quantise_inputs(self, x: Tensor) -> Tensor:
        """Round inputs [..., in], each row separately."""
        flat = x.reshape(-1, x.shape[-1])
        return fake_quantise(flat, ALONG_ROWS).view(x.shape)

    def quantise_matrix(self, matrix: Tensor) -> Tensor:
        """Round one matrix, or this rank's part of it: [out, in]."""
        return fake_quantise(matrix, SQUARE)


@register_weight_loader_v2_supported_method
class EmulatedFp8Linear(_Emulated, UnquantizedLinearMethod):  # type: ignore[misc]
    """One linear layer of the policy in emulated FP8."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Round the weight before vLLM packs it, at start and refits; fused matrices are rounded separately."""
        for matrix in layer.weight.data.split(layer.output_partition_sizes):
            matrix.copy_(self.quantise_matrix(matrix))
        super().process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the layer: [..., in] -> [..., out]."""
        output: Tensor = super().apply(layer, self.quantise_inputs(x), bias)
        return output


class EmulatedFp8Experts(_Emulated, UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """The experts of one layer of the policy in emulated FP8."""

    @property
    def is_monolithic(self) -> bool:
        """Whether the kernel itself chooses the experts; here the model's router does."""
        return False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Round the weights of this rank, at the start and at every refit; no kernel packs them."""
        for w13, w2 in zip(layer.w13_weight.data, layer.w2_weight.data, strict=True):
            for matrix in (*w13.chunk(2), w2):
                matrix.copy_(self.quantise_matrix(matrix))

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
        inputs = self.quantise_inputs(x)
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
            gates = topk_weights[tokens, places, None]
            total[tokens] += self._expert(layer, expert, inputs[tokens], gates)[: len(tokens)].float()
        return total.to(x.dtype)

    def _expert(self, layer: Any, expert: int, inputs: Tensor, gates: Tensor) -> Tensor:
        """One expert's weighted outputs [padded rows, hidden] for rounded inputs and their weights.

        As in the trainer, inner activations are weighted before they are rounded.
        """
        more = -len(inputs) % ROWS_TOGETHER
        fused = F.linear(F.pad(inputs, (0, 0, 0, more)), layer.w13_weight[expert])
        gate, up = fused.chunk(2, -1)
        inner = (F.silu(gate) * up * F.pad(gates, (0, 0, 0, more))).to(inputs.dtype)
        return F.linear(self.quantise_inputs(inner), layer.w2_weight[expert])
