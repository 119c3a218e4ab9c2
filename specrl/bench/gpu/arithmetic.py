"""The sections of `specrl bench gpu` without a model: the sampler, and FP8 against the emulation."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specrl.bench.gpu.models import Scale
from specrl.precision import native
from specrl.precision.blocks import ALONG_ROWS, ALONG_TOKENS, SQUARE, fake_quantise, quantise
from specrl.rollout.sampling.inverse_cdf import pick, uniforms

Row = dict[str, Any]
TOKENS = 512
"""The number of rows of the FP8 products."""
PRODUCT_ERROR = 0.005
"""The error, as a part of the norm, up to which two products are the same: FP32 sums in another order, and the output's
rounding to BF16."""


def sampler(scale: Scale, folder: Path) -> Iterator[Row]:
    """Compare the picked tokens with those of FP64 on the CPU, and the time with torch's softmax and multinomial."""
    del folder
    device, vocab = torch.device("cuda" if torch.cuda.is_available() else "cpu"), scale.served.vocab
    for rows in scale.batches:
        generator = torch.Generator().manual_seed(rows)
        logits = torch.randn(rows, vocab, generator=generator) * 4
        temperature, top_k, top_p = torch.ones(rows), torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
        u = uniforms(torch.arange(rows), torch.full((rows,), 7))
        cumulative = logits.double().softmax(-1).cumsum(-1)
        expected = torch.searchsorted(cumulative, u[:, None].double(), right=True)[:, 0]
        own, own_u = logits.to(device), u.to(device)
        tokens = pick(own, temperature, top_k, top_p, own_u).tokens.cpu()
        edges = (cumulative - u[:, None].double()).abs().min(-1).values
        yield {
            "rows": rows,
            "vocabulary": vocab,
            "unexplained": int(((tokens != expected) & (edges > 1e-5)).sum()),  # what rounding cannot have decided
            "near_ties": int(((tokens != expected) & (edges <= 1e-5)).sum()),
            "ms": 1e3 * _seconds(lambda: pick(own, temperature, top_k, top_p, own_u), device, scale.repeats),  # noqa: B023
            "torch_ms": 1e3 * _seconds(lambda: own.softmax(-1).multinomial(1), device, scale.repeats),  # noqa: B023
        }


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    return min(found[1:])


def fp8(scale: Scale, folder: Path) -> Iterator[Row]:
    """Compare products of random activations with outliers and random weights, layer by layer.

    Errors are parts of the norm. `against_bf16` is what blockwise e4m3 costs, by the emulation; the others say how far
    the device's own FP8 is from the emulation, and are right below `PRODUCT_ERROR`.
    """
    del folder
    shape = scale.served
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "qkv": (shape.hidden, query + 2 * kv),
        "o": (query, shape.hidden),
        "gate_up": (shape.hidden, 2 * shape.intermediate),
        "down": (shape.intermediate, shape.hidden),
    }
    for name, (inner, out) in sizes.items():
        x, weight = _matrices(inner, out)
        against = error(emulated(x, weight), x.float() @ weight.float().t())
        errors = native_errors(x, weight)
        right = all(value < PRODUCT_ERROR for value in errors.values()) if errors else None
        yield {"layer": name, "in": inner, "out": out, "against_bf16": against, **errors, "right": right}


def _matrices(inner: int, out: int) -> tuple[Tensor, Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(inner + out)
    x = torch.randn(TOKENS, inner, device=device, generator=generator)
    x[:, ::97] *= 50
    weight = torch.randn(out, inner, device=device, generator=generator) * inner**-0.5
    return x.bfloat16(), weight.bfloat16()


def native_errors(x: Tensor, weight: Tensor) -> dict[str, float]:
    """Return the errors of the device's own FP8, by engine; none without a GPU that has FP8 in blocks."""
    found: dict[str, float] = {}
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < native.FIRST_CAPABILITY:
        return found
    if torch.cuda.get_device_capability() == native.FIRST_CAPABILITY:  # torch has the kernel for Hopper alone
        values, scales = quantise(x, ALONG_ROWS)
        weight_values, weight_scales = quantise(weight, SQUARE)
        rows = scales.t().contiguous().t()  # outer dimension first, as the kernel wants it
        own = torch._scaled_mm(values, weight_values.t(), rows, weight_scales.t(), out_dtype=torch.bfloat16)
        found["scaled_mm"] = error(own, emulated(x, weight))
    if importlib.util.find_spec("transformer_engine") is not None:
        found |= _transformer_engine_errors(x, weight)
    return found


def _transformer_engine_errors(x: Tensor, weight: Tensor) -> dict[str, float]:
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
        "te": error(output.detach(), emulated(x.detach(), weight)),
        "te_input_gradient": error(x.grad, inputs),
        "te_weight_gradient": error(linear.weight.grad, weights),
    }


def emulated(x: Tensor, weight: Tensor) -> Tensor:
    """Return the emulation's product."""
    return fake_quantise(x, ALONG_ROWS).float() @ fake_quantise(weight, SQUARE).float().t()


def error(found: Tensor, expected: Tensor) -> float:
    """Return the distance of two matrices as a part of the norm of the second."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())
