"""FP8 on GPUs by Transformer Engine's `Float8BlockScaling`: e4m3 in blocks of 128x128 and 1x128, forward and backward.

Megatron enables Transformer Engine's autocast around every transformer layer; layers that stay in BF16 disable it for
themselves.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch

FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""Scales may be any float32 number, not only powers of two; read when Transformer Engine's recipes are imported."""
QUANTISERS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")  # attributes of its recipe
FIRST_CAPABILITY = (9, 0)  # on older GPUs vLLM would use kernels that leave activations in BF16
FIRST_OF_POWERS = (10, 0)  # from here on Transformer Engine and DeepGEMM only take powers of two as scales


def check_training() -> None:
    """Raise ValueError if the trainer has a GPU and cannot compute in native FP8 on it; set its scales.

    Call this before Transformer Engine is used.
    """
    if not torch.cuda.is_available():
        return
    check_device("precision.training")
    if torch.cuda.get_device_capability() >= FIRST_OF_POWERS:
        raise ValueError(
            'precision.training = "fp8": from compute capability 10.0 (Blackwell) on, the scales of Transformer Engine '
            'are powers of two, and those of the engine are not; set precision.training = "bf16"'
        )
    if os.environ.setdefault(FP32_SCALES, "1") != "1":
        raise ValueError(
            f"{FP32_SCALES} = {os.environ[FP32_SCALES]} in the environment asks for scales that are powers of two, and "
            "those of the engine are not: unset it"
        )
    set_scales()


def check_device(key: str) -> None:
    """Raise ValueError, which names `key`, unless this GPU can compute in native FP8."""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < FIRST_CAPABILITY:
        raise ValueError(
            f'{key} = "fp8": FP8 in blocks needs a GPU of compute capability 9.0 (Hopper) or later, this one has '
            f'{major}.{minor}; set {key} = "bf16"'
        )


def set_scales() -> None:
    """Let Transformer Engine's later recipes use any scales, as the engine does, or raise ValueError.

    Megatron has already imported it, so its variable has been read into the attributes that are set here.
    """
    from transformer_engine.common.recipe import Float8BlockScaling, Format, QParams

    for name in QUANTISERS:
        setattr(Float8BlockScaling, name, QParams(power_2_scale=False, amax_epsilon=0.0))
    made = Float8BlockScaling(fp8_format=Format.E4M3)
    if wrong := [name for name in QUANTISERS if getattr(made, name).power_2_scale]:
        raise ValueError(
            f"this Transformer Engine keeps its own scales in {wrong[0]}: start specrl with {FP32_SCALES}=1 in the "
            "environment"
        )


def keep_in_bf16(layers: dict[str, Any], names: Collection[str]) -> None:
    from transformer_engine.pytorch import autocast

    for name in names:
        module = layers[name]
        forward = module.forward

        def in_bf16(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            with autocast(enabled=False):
                return forward(*args, **kwargs)

        module.forward = in_bf16
