"""The precision of a rollout engine: its recipe in terms of vLLM, and checks that vLLM follows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specrl.config import PrecisionConfig
from specrl.precision import native
from specrl.precision.recipe import KvScales, Mode, NotQuantisedError, Recipe, engine_name

FIRST_FP8_CAPABILITY = (8, 9)
"""The compute capability of the first NVIDIA devices with FP8 (Ada)."""
EMULATED = ("EmulatedFp8Linear", "EmulatedFp8Experts")
NATIVE = "fp8_per_block"
"""vLLM's online quantisation, with FP32 scales: weights in blocks of 128x128 at each load, activations of 1x128."""
NATIVE_EXPERTS = "Fp8PerBlockOnlineMoEMethod"
NATIVE_METHODS = ("Fp8PerBlockOnlineLinearMethod", NATIVE_EXPERTS)
WEIGHT_ONLY = ("MARLIN", "HUMMING", "CPU", "EMULATION")
"""The kernels for experts, as vLLM names them, that keep activations in BF16 or may do so."""


class EnginePrecision:
    """The FP8 of one engine. Without a recipe, or if `precision` asks for BF16, its methods do nothing.

    Linear layers compute in native FP8 on GPUs, and in emulated FP8 elsewhere.
    """

    def __init__(self, config: PrecisionConfig, recipe: Recipe | None) -> None:
        self.recipe = recipe
        self._has_fp8_linears = recipe is not None and config.generation == "fp8" and bool(recipe.fp8_layers)
        self._has_fp8_kv_cache = recipe is not None and config.kv_cache == "fp8"
        if self._has_fp8_linears and torch.cuda.is_available():
            native.check_device("precision.generation")
        if self._has_fp8_kv_cache and not has_fp8_kv_cache():
            raise ValueError(
                'precision.kv_cache = "fp8": this device has no FP8 KV cache (vLLM needs AVX-512 or AMX, or a GPU of '
                'compute capability 8.9); use "bf16"'
            )

    @property
    def _linears(self) -> Recipe | None:
        return self.recipe if self._has_fp8_linears else None

    def arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's `EngineArgs` for this precision.

        vLLM treats a router as an ordinary linear layer, so the policy's routers must be excluded by name. A drafter's
        layer keeps its KV cache in the compute type.
        """
        found: dict[str, Any] = {}
        if (recipe := self._linears) is not None and torch.cuda.is_available():
            kept = [engine_name(recipe.family, name) for name in recipe.kept_layers]
            if recipe.family.router is not None:
                kept += [f"model.layers.{layer}.{recipe.family.router.hf}" for layer in range(recipe.num_layers)]
            settings = {"linear": NATIVE, "moe": NATIVE, "ignore": kept}
            found = {"quantization": NATIVE, "quantization_config": settings}
        if self.recipe is not None and self._has_fp8_kv_cache:
            found |= {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": [str(self.recipe.num_layers)]}
            if torch.cuda.is_available():
                # FlashInfer, vLLM's default elsewhere, would compute with the scales of the engine's first iteration.
                is_hopper = torch.cuda.get_device_capability()[0] == 9
                found["attention_backend"] = "FLASH_ATTN" if is_hopper else "TRITON_ATTN"
        return found

    def hf_updates(self) -> dict[str, Any]:
        """The entries of the model's configuration that make vLLM use `EmulatedFp8Config`; none on GPUs."""
        recipe = self._linears
        if recipe is None or torch.cuda.is_available():
            return {}
        from specrl.rollout.vllm.fp8 import EMULATION  # importing it registers it with vLLM

        return {"quantization_config": {"quant_method": EMULATION, "layers": recipe.engine_layers}}

    @property
    def kv_scales(self) -> KvScales | None:
        """The scales of the FP8 KV cache in use; None with a BF16 cache."""
        return self.recipe.kv_scales if self.recipe is not None and self._has_fp8_kv_cache else None

    def restore(self, kv_scales: KvScales | None) -> None:
        """Set a resumed run's KV scales, applied when weights are next loaded; None keeps the calibration's."""
        if self.recipe is not None:
            self.recipe = replace(self.recipe, kv_scales=kv_scales or self.recipe.kv_scales)

    def mode(self, model: nn.Module) -> Mode:
        """How the policy's module computes FP8; "off" if no layer does."""
        layers = dict(_layers(model)).values() if self._linears is not None else ()
        if any(_method(layer) in EMULATED for layer in layers):
            return "emulated"
        is_native = any(_method(layer) in NATIVE_METHODS and native_flaw(layer) is None for layer in layers)
        return "native" if is_native else "off"

    @torch.inference_mode()
    def loaded(self, model: nn.Module, kv_scales: KvScales | None) -> None:
        """Put the KV scales in place after weights were loaded, because loading resets them to vLLM's own.

        The caller must drop cached prefixes, which were stored with the old scales.

        Args:
            model: The policy's module inside the engine.
            kv_scales: New scales; None keeps the old ones.
        """
        if not self._has_fp8_kv_cache:
            return
        self.restore(kv_scales)
        if self.kv_scales is None:
            raise ValueError('precision.kv_cache = "fp8" needs scales of queries, keys and values: calibrate first')
        for _, attention, letter, value in _places(model, self.kv_scales):
            getattr(attention, f"_{letter}_scale").fill_(value)
            setattr(attention, f"_{letter}_scale_float", value)
            if letter != "q":
                getattr(attention, f"_{letter}_scale_cpu").fill_(value)

    def assert_quantised(self, model: nn.Module) -> None:
        """Check that every layer of the policy's module computes in the precision that the recipe prescribes.

        The comparison with the trainer's tensors checks that weights and inputs are rounded correctly.
        """
        if self._linears is not None:
            _assert_linears(model, set(self._linears.engine_layers))
        for layer, attention, letter, value in _places(model, self.kv_scales) if self.kv_scales is not None else ():
            stored = torch.tensor(value, dtype=torch.float32).item()
            found = {float(getattr(attention, f"_{letter}_scale")), getattr(attention, f"_{letter}_scale_float")}
            if not found <= {stored, value}:
                raise NotQuantisedError(
                    f"layer {layer} of the engine stores {letter} in FP8 with the scale {max(found):g}, not {value:g}"
                )


def _assert_linears(model: nn.Module, expected: set[str]) -> None:
    layers = dict(_layers(model))
    for name, layer in layers.items():
        is_native = _method(layer) in NATIVE_METHODS
        if (is_native or _method(layer) in EMULATED) != (name in expected):
            precision = "BF16" if name in expected else "FP8"
            raise NotQuantisedError(f"{name} of the engine computes in {precision}, unlike its recipe")
        if is_native and (flaw := native_flaw(layer)):
            raise NotQuantisedError(f"{name} of the engine {flaw}")
    if missing := expected - layers.keys():
        raise NotQuantisedError(f"the engine's policy has no layer {min(missing)}")


def native_flaw(layer: Any) -> str | None:
    """Why a layer that should compute in native FP8 does not; None if it does.

    Kernels for older devices keep only the weights in FP8.
    """
    if _method(layer) == NATIVE_EXPERTS:
        backend = layer.quant_method.fp8_backend.name
        kernel, weights = backend if backend in WEIGHT_ONLY else None, [layer.w13_weight, layer.w2_weight]
    else:
        name = type(getattr(layer.quant_method, "fp8_linear", None)).__name__
        kernel, weights = name if "Marlin" in name else None, [layer.weight]
    if kernel is not None:
        return f"computes with {kernel}: its activations are not in FP8"
    if wrong := [weight.dtype for weight in weights if weight.dtype != torch.float8_e4m3fn]:
        return f"holds weights of {wrong[0]}, not in FP8"
    scales = getattr(layer, "weight_scale_inv", None)
    if scales is not None and scales.dtype == torch.float32 and not bool((scales > 0).all()):  # false for NaN too
        return "has weight scales that are not above 0"
    return None


def _method(layer: Any) -> str:
    return type(layer.quant_method).__name__


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with a quantisation method, by the names that vLLM uses to choose the method.

    A layer's experts are in a module inside the one with that name.
    """
    for name, module in model.named_modules():
        if getattr(module, "quant_method", None) is not None:
            yield name.removesuffix(".routed_experts"), module


def _places(model: nn.Module, scales: KvScales) -> Iterator[tuple[int, Any, str, float]]:
    for layer, values in enumerate(zip(scales.q, scales.k, scales.v, strict=True)):
        attention: Any = model.get_submodule(f"model.layers.{layer}.self_attn.attn")
        for letter, value in zip("qkv", values, strict=True):
            yield layer, attention, letter, value


def has_fp8_kv_cache() -> bool:
    """Whether vLLM stores keys and values in FP8 on this device."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= FIRST_FP8_CAPABILITY
    return bool(torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported())
