"""The precision of a rollout engine: what its recipe means inside vLLM, and checks that vLLM follows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specrl.config import PrecisionConfig
from specrl.precision import native
from specrl.precision.recipe import KvScales, Mode, Recipe

FIRST_FP8_CAPABILITY = (8, 9)
"""The compute capability of the first NVIDIA devices with FP8 (Ada)."""


class EnginePrecision:
    """The FP8 of one engine. Without a recipe, or if `precision` asks for BF16, its methods do nothing."""

    def __init__(self, config: PrecisionConfig, recipe: Recipe | None) -> None:
        self.recipe = recipe
        self._has_fp8_linears = recipe is not None and config.generation == "fp8" and bool(recipe.fp8_layers)
        self._has_fp8_kv_cache = recipe is not None and config.kv_cache == "fp8"
        if self._has_fp8_linears:
            _check_linears(config)
        if self._has_fp8_kv_cache:
            _check_kv_cache()
        self.num_loads = 0
        """How often the engine was given weights, the start included."""

    @property
    def _linears(self) -> Recipe | None:
        """The recipe if linear layers are FP8."""
        return self.recipe if self._has_fp8_linears else None

    def arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's `EngineArgs` for this precision.

        The layer of a drafter keeps its KV cache in the compute type.
        """
        found: dict[str, Any] = {} if self._linears is None else _fp8().linear_arguments(self._linears)
        if self.recipe is not None and self._has_fp8_kv_cache:
            found |= {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": [str(self.recipe.num_layers)]}
        return found

    def hf_updates(self) -> dict[str, Any]:
        """The entries that the model's configuration needs for this precision."""
        return {} if self._linears is None else dict(_fp8().hf_updates(self._linears))

    @property
    def kv_scales(self) -> KvScales | None:
        """The scales of the FP8 KV cache that are in use; None with a BF16 cache."""
        return self.recipe.kv_scales if self.recipe is not None and self._has_fp8_kv_cache else None

    def restore(self, kv_scales: KvScales | None) -> None:
        """Take the KV scales of a resumed run, which the next weights put in place; None keeps the calibration's."""
        if self.recipe is not None:
            self.recipe = self.recipe.with_kv_scales(kv_scales)

    def mode(self, model: nn.Module) -> Mode:
        """How the policy's module computes FP8; "off" if no layer does."""
        mode: Mode = "off" if self._linears is None else _fp8().mode_of(model)
        return mode

    def loaded(self, model: nn.Module, kv_scales: KvScales | None) -> None:
        """Put the KV scales in place after weights were loaded, because loading resets them to vLLM's own.

        Args:
            model: The policy's module inside the engine.
            kv_scales: New scales; None keeps the old ones.

        Raises:
            ValueError: The KV cache is FP8 and there are no scales.
        """
        self.num_loads += 1
        if not self._has_fp8_kv_cache:
            return
        self.restore(kv_scales)
        if self.kv_scales is None:
            raise ValueError('precision.kv_cache = "fp8" needs scales of queries, keys and values: calibrate first')
        _fp8().set_kv_scales(model, self.kv_scales)

    def assert_quantised(self, model: nn.Module, *, compiled: bool) -> None:
        """Check, after a generation, that the engine has quantised activations and all weights that it was given.

        Raises:
            NotQuantisedError: A layer computes in another precision than the recipe says, or stores keys and values
                with other scales; it names the first.
        """
        if self._linears is not None:
            _fp8().assert_quantised(model, self._linears, self.num_loads, counts_activations=not compiled)
        if self.kv_scales is not None:
            _fp8().assert_kv_scales(model, self.kv_scales)


def _fp8() -> Any:
    from specrl.rollout.vllm import fp8  # imports vLLM

    return fp8


def _check_linears(config: PrecisionConfig) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        native.check_device("precision.generation")
    if config.hardware == "native" and not cuda:
        raise ValueError('precision.hardware = "native": vLLM has no native FP8 on this device; "any" emulates it')
    if config.scales == "power_of_two" and cuda:
        raise ValueError('precision.scales = "power_of_two": vLLM quantises weights on a GPU with "fp32" scales only')


def has_fp8_kv_cache() -> bool:
    """Whether vLLM stores keys and values in FP8 on this device."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= FIRST_FP8_CAPABILITY
    return bool(torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported())


def _check_kv_cache() -> None:
    if not has_fp8_kv_cache():
        raise ValueError(
            'precision.kv_cache = "fp8": this device has no FP8 KV cache (vLLM needs AVX-512 or AMX, or a GPU of '
            'compute capability 8.9); use "bf16"'
        )
