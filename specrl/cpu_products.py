"""Matrix products of BF16 on CPUs that have no instructions for them.

PyTorch computes such products one number after another there: on an AMD EPYC of the third generation (AVX2) eight times
slower than in float32. Here the matrices are widened to float32, and the result is rounded to BF16 once. That is what
BF16 instructions compute, too: products of two BF16 numbers are exact in float32, in which they are added up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

OPERATORS = ("mm", "addmm", "bmm", "baddbmm")
"""The operators of ATen that linear layers and `@` lead to; attention in one operation and products with a vector are
others, and stay as they are."""


def has_bf16() -> bool:
    """Return whether this machine's CPU computes products of BF16 with vectors, as AVX-512 and AMX do."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def multiply_in_float32() -> Any:
    """Let the rest of this process compute products of BF16 matrices on its CPU in float32.

    All other products are computed as before.

    Returns:
        What holds the change; it ends with this object, which is kept.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that kernels are replaced
        for name in (operator + overload for operator in OPERATORS for overload in ("", ".out")):
            original = torch.library.get_kernel(f"aten::{name}", "CPU")
            widened = _widened(getattr(torch, name.removesuffix(".out")), original)
            library.impl(name, widened, "CPU", with_keyset=True)
    return library


def _widened(product: Callable[..., Tensor], original: Any) -> Callable[..., Tensor]:
    """Return an operator that calls `product` with float32 for operands in BF16, and `original` for all others."""

    def multiply(keys: Any, *operands: Tensor, out: Tensor | None = None, **options: float) -> Tensor:
        if any(tensor.dtype != torch.bfloat16 for tensor in (*operands, *(() if out is None else (out,)))):
            given = options if out is None else {**options, "out": out}
            untouched: Tensor = original.call_boxed(keys, *operands, **given)
            return untouched
        result = product(*(operand.float() for operand in operands), **options)
        return result.bfloat16() if out is None else out.resize_(result.shape).copy_(result)

    return multiply
