"""The drafter with 8-bit linear layers, in the layout of the `compressed-tensors` library, which vLLM loads as it is.

Each weight is rounded to the nearest, with one float32 scale per output channel. What a layer reads is quantised while
serving, with one scale per token. `fc` stays as it is, with norms and head: it reads the policy's hidden states, in
many models a few of whose elements are far larger than the others and would set the scale of a token alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specrl.config import ConfigError
from specrl.export.card import ExportedDrafter
from specrl.export.formats import FORMATS, Format
from specrl.precision.blocks import quantise

INT8_MAX = 127  # a symmetric range
QUANTISED = "_proj.weight"  # suffix of the weights that are quantised
KEPT = ("fc", "lm_head")


@dataclass(frozen=True)
class Scheme:
    """A number format of weights and of what the layers read."""

    words: str  # on the model card
    kind: str  # what `compressed-tensors` calls its numbers
    layout: str  # what it calls that of the tensors


SCHEMES = {"int8": Scheme("INT8", "int", "int-quantized"), "fp8": Scheme("FP8 (e4m3)", "float", "float-quantized")}


def find_scheme(name: str) -> Scheme:
    if name not in SCHEMES:
        raise ConfigError(f"--quantize {name}: allowed are {', '.join(SCHEMES)}")
    return SCHEMES[name]


def quantised_format(scheme: Scheme) -> Format:
    """The original layout with the linear layers in a scheme."""

    def tensors(drafter: ExportedDrafter) -> dict[str, Tensor]:
        found = FORMATS["eagle3"].tensors(drafter)
        for name in [name for name in found if name.endswith(QUANTISED)]:
            found[name], found[f"{name}_scale"] = quantised(found[name], scheme)
        return found

    config = {"quantization_config": quantisation_config(scheme)}
    return replace(FORMATS["eagle3"], config=lambda own: own.config | config, tensors=tensors)


def quantised(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """A weight `[out, in]` rounded to 8 bits, and its scales, float32 `[out, 1]`: the product approximates it."""
    if scheme.kind == "float":
        return quantise(weight, (1, weight.shape[1]))
    values = weight.float()
    scales = values.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX
    return (values / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales


def quantisation_config(scheme: Scheme) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": scheme.kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "strategy": "channel", "dynamic": False},
                "input_activations": {**numbers, "strategy": "token", "dynamic": True},
            }
        },
        # vLLM puts a prefix before these names, and other readers do not.
        "ignore": [f"re:(.*\\.)?{name}$" for name in KEPT],
    }


def quantisation_paragraph(scheme: Scheme, original: Path) -> str:
    """What the model card says of the quantisation of the drafter in the folder `original`."""
    return f"""The linear layers of its decoder have {scheme.words} weights, in the layout of `compressed-tensors`: each
rounded to the nearest, with one scale per output channel and without calibration. What they read is quantised while
serving, with one scale per token. Norms, head and `fc` are not quantised. The figures below were measured before the
quantisation; this measures both drafters side by side:

    specrl bench drafter --model POLICY --drafter {original},FOLDER --data PROMPTS.jsonl
"""
