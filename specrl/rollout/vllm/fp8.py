"""FP8 inside vLLM: emulated on CPUs through its registry of quantisation methods, native on GPUs.

The emulation rounds weights once per (re)load and activations before every product, with the functions of the trainer's
emulation; the product of a linear layer is vLLM's own, of weights and activations in the compute type. vLLM's kernels
for experts on a CPU compute both products in one call, without a place in between at which activations could be
rounded, so the emulation computes expert after expert. Only the policy's layers named by the recipe are touched: head,
embeddings, norms, routers and any drafter stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
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

from specrl.precision.blocks import ALONG_ROWS, SQUARE, fake_quantise, fake_quantise_rows
from specrl.precision.recipe import KvScales, Mode, NotQuantisedError, Recipe, engine_name

EMULATION = "specrl_fp8"
NATIVE_METHOD, NATIVE_EXPERTS = "Fp8PerBlockOnlineLinearMethod", "Fp8PerBlockOnlineMoEMethod"
NATIVE = "fp8_per_block"
"""vLLM's online quantisation, with FP32 scales: weights in blocks of 128x128 at each load, activations of 1x128."""
WEIGHT_ONLY = ("MARLIN", "HUMMING", "CPU", "EMULATION")
"""The kernels for experts, as vLLM names them, that keep activations in BF16 or may do so."""
ROWS_TOGETHER = 16
"""Inputs of an expert are filled up to a multiple of this many rows: with only a few, the product of a row would take
another kernel, whose last bits differ, and would depend on how many other tokens chose the same expert."""


def linear_arguments(recipe: Recipe) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs` for the recipe's layers to be in FP8, native on GPUs, else emulated.

    To vLLM a router is a linear layer like any other, so that those of the policy must be left out by name.
    """
    if torch.cuda.is_available():
        kept = [engine_name(recipe.family, name) for name in recipe.kept_layers]
        if recipe.family.router is not None:
            kept += [f"model.layers.{layer}.{recipe.family.router.hf}" for layer in range(recipe.num_layers)]
        return {"quantization": NATIVE, "quantization_config": {"linear": NATIVE, "moe": NATIVE, "ignore": kept}}
    return {"quantization": EMULATION}


def hf_updates(recipe: Recipe) -> dict[str, Any]:
    """The entries of the model's configuration from which vLLM makes `EmulatedFp8Config`; none on GPUs."""
    if torch.cuda.is_available():
        return {}
    settings = {"quant_method": EMULATION, "layers": recipe.engine_layers, "power_of_two": recipe.power_of_two}
    return {"quantization_config": settings}


@register_quantization_config(EMULATION)
class EmulatedFp8Config(QuantizationConfig):  # type: ignore[misc]
    """Says which layers are emulated. vLLM makes it from `quantization_config`."""

    def __init__(self, layers: frozenset[str], power_of_two: bool) -> None:
        super().__init__()
        self.layers, self.power_of_two = layers, power_of_two

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
        return cls(frozenset(config["layers"]), config["power_of_two"])

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            return EmulatedFp8Linear(self.power_of_two) if prefix in self.layers else UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts) and prefix in self.layers:
            return EmulatedFp8Experts(layer.moe_config, self.power_of_two)
        return None  # head, embeddings and attention stay as vLLM has them


@register_weight_loader_v2_supported_method
class EmulatedFp8Linear(UnquantizedLinearMethod):  # type: ignore[misc]
    """One linear layer of the policy in emulated FP8."""

    def __init__(self, power_of_two: bool) -> None:
        super().__init__()
        self.power_of_two = power_of_two
        self.sizes: list[int] = []
        """The number of rows of each fused matrix on this rank."""
        self.num_weight_quantisations = 0
        self.num_activation_quantisations = 0

    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], *args: Any, **kw: Any
    ) -> None:
        self.sizes = list(output_partition_sizes)
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *args, **kw)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Round the weight before vLLM packs it, at the start and at every refit."""
        weight: Any = layer.weight
        weight.data.copy_(self.quantise_weight(weight.data))
        self.num_weight_quantisations += 1
        super().process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the layer: [..., in] -> [..., out]."""
        if not torch.compiler.is_compiling():
            self.num_activation_quantisations += 1
        output: Tensor = super().apply(layer, self.quantise_inputs(x), bias)
        return output

    def quantise_weight(self, weight: Tensor) -> Tensor:
        """Round a weight [out, in] of this rank, in which fused matrices follow each other along `out`."""
        return fake_quantise_rows(weight, self.sizes, power_of_two=self.power_of_two)

    def quantise_inputs(self, x: Tensor) -> Tensor:
        """Round inputs [..., in], each row by itself."""
        flat = x.reshape(-1, x.shape[-1])
        return fake_quantise(flat, ALONG_ROWS, power_of_two=self.power_of_two).view(x.shape)


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


EMULATED = (EmulatedFp8Linear, EmulatedFp8Experts)


def mode_of(model: nn.Module) -> Mode:
    """How the policy's module inside the engine computes FP8; "off" if no layer does."""
    layers = dict(_layers(model)).values()
    if any(isinstance(layer.quant_method, EMULATED) for layer in layers):
        return "emulated"
    return "native" if any(_is_native(layer) and native_flaw(layer) is None for layer in layers) else "off"


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that have a quantisation method, by the names that vLLM knows them by when it chooses one.

    The experts of a layer are in a module of their own inside the one of that name.
    """
    for name, module in model.named_modules():
        if getattr(module, "quant_method", None) is not None:
            yield name.removesuffix(".routed_experts"), module


def _is_native(layer: Any) -> bool:
    return type(layer.quant_method).__name__ in (NATIVE_METHOD, NATIVE_EXPERTS)


def native_flaw(layer: Any) -> str | None:
    """Why a layer for which vLLM was asked for native FP8 does not compute in it; None if it does.

    Kernels for older devices keep only the weights in FP8.
    """
    if type(layer.quant_method).__name__ == NATIVE_EXPERTS:
        backend = layer.quant_method.fp8_backend.name
        if backend in WEIGHT_ONLY:
            return f"computes with {backend}: its activations are not in FP8"
        wrong = [weight.dtype for weight in (layer.w13_weight, layer.w2_weight) if weight.dtype != torch.float8_e4m3fn]
        return f"holds weights of {wrong[0]}, not in FP8" if wrong else None
    weight: Any = layer.weight
    kernel = type(getattr(layer.quant_method, "fp8_linear", None)).__name__
    if "Marlin" in kernel:
        return f"computes with {kernel}: its activations are not in FP8"
    if weight.dtype != torch.float8_e4m3fn:
        return f"holds weights of {weight.dtype}, not in FP8"
    scales = getattr(layer, "weight_scale_inv", None)
    if scales is not None and scales.dtype == torch.float32 and not bool((scales > 0).all()):  # false for NaN, too
        return "has weight scales that are not above 0"
    return None


def assert_quantised(model: nn.Module, recipe: Recipe, num_loads: int, *, counts_activations: bool) -> None:
    """Check that every layer that the recipe names, and no other, computes in FP8.

    Args:
        model: The policy's module inside the engine.
        recipe: Which layers are FP8.
        num_loads: How often weights have been loaded, the start included; each time they must have been quantised.
        counts_activations: Whether quantised activations are counted; under torch.compile they are not.

    Raises:
        NotQuantisedError: A layer computes in another precision than the recipe says; the error names the first.
    """
    expected, layers = set(recipe.engine_layers), dict(_layers(model))
    for name, layer in layers.items():
        method = layer.quant_method
        is_fp8 = isinstance(method, EMULATED) or _is_native(layer)
        if is_fp8 != (name in expected):
            precision = "FP8" if is_fp8 else "BF16"
            raise NotQuantisedError(f"{name} of the engine computes in {precision}, unlike its recipe")
        if _is_native(layer) and (flaw := native_flaw(layer)):
            raise NotQuantisedError(f"{name} of the engine {flaw}")
        if not isinstance(method, EMULATED):
            continue
        if method.num_weight_quantisations < num_loads:
            raise NotQuantisedError(
                f"{name} of the engine holds weights that were not quantised: {num_loads} loads, "
                f"{method.num_weight_quantisations} quantisations"
            )
        if counts_activations and not method.num_activation_quantisations:
            raise NotQuantisedError(f"{name} of the engine has quantised no activations")
    if missing := expected - layers.keys():
        raise NotQuantisedError(f"the engine's policy has no layer {min(missing)}")


def assert_kv_scales(model: nn.Module, scales: KvScales) -> None:
    """Check that the policy's attention layers still have these scales, which loading weights resets to vLLM's own.

    Raises:
        NotQuantisedError: A layer has another scale; the error names the first.
    """
    for layer, attention, letter, value in _places(model, scales):
        stored = torch.tensor(value, dtype=torch.float32).item()
        found = {float(getattr(attention, f"_{letter}_scale")), getattr(attention, f"_{letter}_scale_float")}
        if not found <= {stored, value}:
            raise NotQuantisedError(
                f"layer {layer} of the engine stores {letter} in FP8 with the scale {max(found):g}, not {value:g}"
            )


@torch.inference_mode()
def set_kv_scales(model: nn.Module, scales: KvScales) -> None:
    """Give the policy's attention layers the scales that their FP8 queries, keys and values are stored with.

    The caller must drop cached prefixes, which were stored with the old scales.
    """
    for _, attention, letter, value in _places(model, scales):
        getattr(attention, f"_{letter}_scale").fill_(value)
        setattr(attention, f"_{letter}_scale_float", value)
        if letter != "q":
            getattr(attention, f"_{letter}_scale_cpu").fill_(value)


def _places(model: nn.Module, scales: KvScales) -> Iterator[tuple[int, Any, str, float]]:
    for layer, values in enumerate(zip(scales.q, scales.k, scales.v, strict=True)):
        attention: Any = model.get_submodule(f"model.layers.{layer}.self_attn.attn")
        for letter, value in zip("qkv", values, strict=True):
            yield layer, attention, letter, value
