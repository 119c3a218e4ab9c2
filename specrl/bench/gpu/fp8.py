"""The section on FP8: the device's own arithmetic against the emulation, for every linear layer of an 8B model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specrl.bench.gpu.findings import NEEDS_GPU, Findings
from specrl.bench.gpu.models import Scale, Shape
from specrl.precision import native
from specrl.precision.blocks import ALONG_ROWS, ALONG_TOKENS, SQUARE, fake_quantise, quantise

TOKENS = 512
PRODUCT_ERROR = 0.005
"""The error, as a part of the norm, up to which two products are the same: FP32 sums in another order, and the output's
rounding to BF16."""
TRANSFORMER_ENGINE = "transformer_engine"


def measure(scale: Scale, folder: Path) -> Findings:
    """Compare products of random activations with outliers and random weights, layer by layer."""
    del folder
    found = Findings()
    found.text.append(
        "Errors are parts of the norm. `FP8 against BF16` is what blockwise e4m3 costs, by the emulation; the others "
        f"say how far the device's own FP8 is from the emulation, and must be below {PRODUCT_ERROR}."
    )
    engines = ("torch._scaled_mm", "Transformer Engine", "TE, input gradient", "TE, weight gradient")
    columns = ("layer", "in x out", ">FP8 against BF16", *(f">{name}" for name in engines))
    table = found.table("Native FP8 against the emulation", columns)
    for name, (inner, out) in layers(scale.served).items():
        x, weight = matrices(inner, out)
        cost = error(emulated(x, weight), x.float() @ weight.float().t())
        measured = native_errors(x, weight)
        table.add(name, f"{inner} x {out}", f"{cost:.4f}", *(measured.get(engine, NEEDS_GPU) for engine in engines))
        found.figures[name] = {"against BF16": cost, **measured}
    if torch.cuda.is_available() and importlib.util.find_spec(TRANSFORMER_ENGINE) is None:
        found.text.append("Transformer Engine is not installed: its columns are empty.")
    return found


def layers(shape: Shape) -> Mapping[str, tuple[int, int]]:
    """Return (in, out) of a decoder layer's four fused linear layers."""
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "qkv": (shape.hidden, query + 2 * kv),
        "o": (query, shape.hidden),
        "gate_up": (shape.hidden, 2 * shape.intermediate),
        "down": (shape.intermediate, shape.hidden),
    }


def matrices(inner: int, out: int) -> tuple[Tensor, Tensor]:
    """Return inputs [tokens, in] with outliers and a weight [out, in], both in BF16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(inner + out)
    x = torch.randn(TOKENS, inner, device=device, generator=generator)
    x[:, ::97] *= 50
    weight = torch.randn(out, inner, device=device, generator=generator) * inner**-0.5
    return x.bfloat16(), weight.bfloat16()


def native_errors(x: Tensor, weight: Tensor) -> dict[str, str]:
    """Return the errors of the device's own FP8, by engine; empty without a GPU that has FP8 in blocks."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < native.FIRST_CAPABILITY:
        return {}
    measured: dict[str, str] = {}
    if torch.cuda.get_device_capability() == native.FIRST_CAPABILITY:
        measured["torch._scaled_mm"] = f"{error(tensor_cores(x, weight), emulated(x, weight)):.1e}"
    else:
        measured["torch._scaled_mm"] = "takes these blocks on Hopper only"
    if importlib.util.find_spec(TRANSFORMER_ENGINE) is None:
        return measured | dict.fromkeys(
            ("Transformer Engine", "TE, input gradient", "TE, weight gradient"), "not installed"
        )
    return measured | transformer_engine_errors(x, weight)


def tensor_cores(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product by the kernel that torch has for 1x128 and 128x128 scales."""
    values, scales = quantise(x, ALONG_ROWS)
    weight_values, weight_scales = quantise(weight, SQUARE)
    rows = scales.t().contiguous().t()  # outer dimension first, as the kernel wants it
    return torch._scaled_mm(values, weight_values.t(), rows, weight_scales.t(), out_dtype=torch.bfloat16)


def transformer_engine_errors(x: Tensor, weight: Tensor) -> dict[str, str]:
    """Return the errors of a linear layer of Transformer Engine: its output and both of its gradients."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling, Format

    native.set_scales(power_of_two=False)
    linear: Any = te.Linear(weight.shape[1], weight.shape[0], bias=False, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        linear.weight.copy_(weight)
    x = x.clone().requires_grad_()
    with te.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling(fp8_format=Format.E4M3)):
        output = linear(x)
    grad = torch.randn_like(output) * 1e-3
    output.backward(grad)
    inputs = fake_quantise(grad, ALONG_ROWS).float() @ fake_quantise(weight, SQUARE).float()
    weights = fake_quantise(grad, ALONG_TOKENS).float().t() @ fake_quantise(x.detach(), ALONG_TOKENS).float()
    assert x.grad is not None
    return {
        "Transformer Engine": f"{error(output.detach(), emulated(x.detach(), weight)):.1e}",
        "TE, input gradient": f"{error(x.grad, inputs):.1e}",
        "TE, weight gradient": f"{error(linear.weight.grad, weights):.1e}",
    }


def emulated(x: Tensor, weight: Tensor) -> Tensor:
    """Return the emulation's product."""
    return fake_quantise(x, ALONG_ROWS).float() @ fake_quantise(weight, SQUARE).float().t()


def error(found: Tensor, expected: Tensor) -> float:
    """Return the distance of two matrices as a part of the norm of the second."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())
