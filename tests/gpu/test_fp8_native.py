"""Tests of a real device's FP8 against the emulation: the same blocks and scales, and products equal up to rounding.

Run on a machine with a GPU: `python -m pytest tests/gpu -q`. What its packages lack is skipped by name.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specrl.precision import native
from specrl.precision.blocks import ALONG_ROWS, ALONG_TOKENS, SQUARE, fake_quantise
from tests.dequantise import dequantise, quantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: FP8 was only tested as emulated"),
]
SHAPES = ((4096, 4096, 512), (4096, 12288, 512), (12288, 4096, 512))
"""Shapes (in, out, tokens) of an 8B model's linear layers."""
PRODUCT_ERROR = 0.005
"""The allowed error as a part of the norm, from FP32 sums in another order and the output's rounding to BF16."""
WEIGHT_ERROR = 0.003
"""The same of a weight, some values of which are rounded to the other neighbour."""
HOPPER = (9, 0)


def matrices(inner: int, out: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return inputs [tokens, in] with outliers and a weight [out, in], both in BF16."""
    generator = torch.Generator("cuda").manual_seed(inner + out)
    x = torch.randn(tokens, inner, device="cuda", generator=generator)
    x[:, ::97] *= 50
    weight = torch.randn(out, inner, device="cuda", generator=generator) * inner**-0.5
    return x.bfloat16(), weight.bfloat16()


def emulated(x: Tensor, weight: Tensor) -> Tensor:
    return fake_quantise(x, ALONG_ROWS).float() @ fake_quantise(weight, SQUARE).float().t()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def codes(values: Tensor) -> Tensor:
    """Return the bits of e4m3 values as numbers, in which neighbours of one sign differ by 1."""
    return values.view(torch.uint8).int()


@pytest.mark.parametrize("block", [ALONG_ROWS, ALONG_TOKENS, SQUARE])
def test_the_emulation_is_the_same_function_on_a_gpu(block: tuple[int, int]) -> None:
    x, weight = matrices(576, 1536, 100)
    for values in (x, weight):
        found, expected = quantise(values, block), quantise(values.cpu(), block)
        assert torch.equal(codes(found[0]).cpu(), codes(expected[0]))
        assert torch.equal(found[1].cpu(), expected[1])  # to the last bit
        assert torch.equal(fake_quantise(values, block).cpu(), fake_quantise(values.cpu(), block))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tensor_cores_product_is_the_emulations(shape: tuple[int, int, int]) -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("torch._scaled_mm takes 1x128 and 128x128 scales on Hopper only")
    x, weight = matrices(*shape)
    values, scales = quantise(x, ALONG_ROWS)
    weight_values, weight_scales = quantise(weight, SQUARE)
    rows = scales.t().contiguous().t()  # outer dimension first, as the kernel wants it
    found = torch._scaled_mm(values, weight_values.t(), rows, weight_scales.t(), out_dtype=torch.bfloat16)
    assert error(found, emulated(x, weight)) < PRODUCT_ERROR


@pytest.mark.parametrize("shape", SHAPES)
def test_vllm_quantises_weights_as_the_emulation_does(shape: tuple[int, int, int]) -> None:
    deep_gemm = pytest.importorskip("vllm.utils.deep_gemm", reason="vLLM is not installed")
    _, weight = matrices(*shape)
    values, scales = deep_gemm.per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)
    expected, expected_scales = quantise(weight, SQUARE)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    # vLLM multiplies with the reciprocal of the scale, and its compiler with that of 448 for the scale itself, which
    # differs from dividing in the last bit: that moves values at ties to the other neighbour, whose code is the next.
    differences = (codes(values) - codes(expected)).abs()
    assert int(differences.max()) <= 1
    assert float((differences > 0).float().mean()) < 1e-3
    found = dequantise(values, scales, SQUARE, torch.float32)
    assert error(found, dequantise(expected, expected_scales, SQUARE, torch.float32)) < WEIGHT_ERROR


@pytest.mark.parametrize("shape", SHAPES)
def test_transformer_engine_computes_what_the_emulation_does(shape: tuple[int, int, int]) -> None:
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    from transformer_engine.common.recipe import Float8BlockScaling, Format

    native.set_scales()  # whatever the environment said when it was imported
    x, weight = matrices(*shape)
    linear = te.Linear(shape[0], shape[1], bias=False, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        linear.weight.copy_(weight)
    x.requires_grad_()
    with te.autocast(enabled=True, recipe=Float8BlockScaling(fp8_format=Format.E4M3)):
        found = linear(x)
    assert linear.fp8
    assert error(found.detach(), emulated(x.detach(), weight)) < PRODUCT_ERROR
    grad = torch.randn_like(found) * 1e-3
    found.backward(grad)
    inputs = fake_quantise(grad, ALONG_ROWS).float() @ fake_quantise(weight, SQUARE).float()
    weights = fake_quantise(grad, ALONG_TOKENS).float().t() @ fake_quantise(x.detach(), ALONG_TOKENS).float()
    assert error(x.grad, inputs) < PRODUCT_ERROR
    assert error(linear.weight.grad, weights) < PRODUCT_ERROR
