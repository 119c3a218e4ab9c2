"""Single passes over BF16 activations on CPUs, for which PyTorch has only operators that follow each other.

Numba, which comes with vLLM and needs no compiler on the machine, compiles each at its first use and keeps the result
in `NUMBA_CACHE_DIR`. A pass runs on the threads that PyTorch's operators run on: two sets of threads would take each
other's cores away while they wait for work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
import torch
from llvmlite.binding import load_library_permanently
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

OPENMP = "libgomp.so.1"
"""The OpenMP library of PyTorch's wheels for Linux."""
OPTIONS = {
    "nopython": True,
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},  # sums in the order that fits vectors; NaN and inf stay
}
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
EXP = tuple(map(np.float32, (1.9875691e-4, 1.3981999e-3, 8.3334519e-3, 4.1665796e-2, 1.6666665e-1, 5.0000001e-1)))
"""The coefficients of e^r for |r| < ln 2 / 2 (Cephes), the highest power first."""
C0, C1, C2, C3, C4, C5 = EXP
PRODUCT_ROWS = 4
"""The number of rows that `few_products` multiplies a matrix with; the kernel has a sum for each of them."""
ZERO, ONE, HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)
LOWEST, HIGHEST = np.float32(-87.0), np.float32(88.0)
LEAST, THIRTY_ONE, ALL_BUT_SIGN = np.int32(-(2**31)), np.int32(31), np.int32(2**31 - 1)
SIXTEEN, TWENTY_THREE, LAST_BIT, BELOW_HALF = np.uint32(16), np.int32(23), np.uint32(1), np.uint32(0x7FFF)
BIAS = np.int32(127)

num_threads = types.ExternalFunction("omp_get_num_threads", types.intc())
thread_number = types.ExternalFunction("omp_get_thread_num", types.intc())


@cache
def _run_on_threads() -> Callable[..., None] | None:
    """Return OpenMP's function that runs another one on several threads; None where it is not PyTorch's OpenMP."""
    try:
        function: Callable[..., None] = ctypes.CDLL(OPENMP).GOMP_parallel
    except (OSError, AttributeError):
        return None
    load_library_permanently(OPENMP)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]  # type: ignore[attr-defined]
    function.restype = None  # type: ignore[attr-defined]
    return function


def take(*tensors: Tensor) -> bool:
    """Return whether the passes of this module take these tensors: in BF16 on a CPU, with PyTorch's OpenMP."""
    kind = torch.bfloat16, "cpu"
    return all((tensor.dtype, tensor.device.type) == kind for tensor in tensors) and _run_on_threads() is not None


class Kernel:
    """A pass over rows, each of which one thread computes.

    Args:
        function: Gets the address of 64-bit integers: the number of rows, then the arguments.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    def __call__(self, rows: int, *arguments: int | float | Tensor) -> None:
        """Run the pass; a float is passed as the bits of a float64, a tensor as its address."""
        numbers = np.empty(1 + len(arguments), np.int64)
        numbers[0] = rows
        for place, argument in enumerate(arguments, 1):
            if isinstance(argument, Tensor):
                numbers[place] = argument.data_ptr()
            elif isinstance(argument, float):
                numbers[place : place + 1].view(np.float64)[0] = argument
            else:
                numbers[place] = argument
        run = _run_on_threads()
        assert run is not None, "take tells whether there are kernels"
        run(_compiled(self._function), numbers.ctypes.data, torch.get_num_threads(), 0)


@cache
def _compiled(function: Callable[[Any], None]) -> int:
    """Return the address of a compiled function of one address."""
    compiled: Any = cfunc(types.void(types.voidptr), **OPTIONS)(function)
    return int(compiled.address)


def load_compiler() -> None:
    """Have Numba load what it needs to compile anything, for the processes that are forked from this one."""
    cfunc(types.void(types.voidptr), nopython=True)(lambda _: None)


def inlined(function: Function) -> Function:
    """Return a function that others inline when they are compiled."""
    return cast(Function, njit(inline="always", error_model="numpy")(function))


def _at(context: Any, address: Any) -> Any:
    """Turn an integer into an address, where functions are compiled."""

    def generate(_: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


at: Any = intrinsic(_at)


@inlined
def part(rows: Any) -> Any:
    """Return the first row of this thread and the one behind its last."""
    threads, thread = np.int64(num_threads()), np.int64(thread_number())
    return rows * thread // threads, rows * (thread + 1) // threads


@inlined
def widen(bits: Any) -> Any:
    """Return the float32 of a BF16 number's bits."""
    return np.uint32(np.uint32(bits) << SIXTEEN).view(np.float32)


@inlined
def narrow(value: Any) -> Any:
    """Return the bits of the BF16 number nearest to a float32, of two the even one."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> SIXTEEN) & LAST_BIT)
    return np.uint16(np.uint32(np.uint32(bits + BELOW_HALF) + odd) >> SIXTEEN)


@inlined
def exp(x: Any) -> Any:
    """Return e^x, float32, to the last bit or two; x is limited to what has a normal result, and NaN stays."""
    x = LOWEST if x < LOWEST else x
    x = HIGHEST if x > HIGHEST else x
    power = np.floor(x * LOG2_E + HALF)
    r = x - power * LN2_HIGH - power * LN2_LOW
    series = ((((C0 * r + C1) * r + C2) * r + C3) * r + C4) * r + C5
    exponent = np.int32(np.int32(power) + BIAS)
    return (series * r * r + r + ONE) * np.int32(exponent << TWENTY_THREE).view(np.float32)


@inlined
def ordered(value: Any) -> Any:
    """Return an int32 that is ordered as float32 is, with NaN above all; applied to the int32's bits, the way back.

    Compilers compute maxima of integers with vectors, those of floats only where NaN may be lost.
    """
    bits = np.float32(value).view(np.int32)
    return np.int32(bits ^ np.int32(np.int32(bits >> THIRTY_ONE) & ALL_BUT_SIGN))


def _swiglu(data: Any) -> None:
    numbers = carray(data, 4, np.int64)
    rows, width, x_at, result_at = numbers[0], numbers[1], numbers[2], numbers[3]
    x, result = carray(at(x_at), (rows, 2, width), np.uint16), carray(at(result_at), (rows, width), np.uint16)
    first, last = part(rows)
    for row in range(first, last):
        for column in range(width):
            gate = widen(x[row, 0, column])
            result[row, column] = narrow(gate / (ONE + exp(-gate)) * widen(x[row, 1, column]))


def _swiglu_backward(data: Any) -> None:
    numbers = carray(data, 5, np.int64)
    rows, width, x_at, grad_at, result_at = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    x, grad = carray(at(x_at), (rows, 2, width), np.uint16), carray(at(grad_at), (rows, width), np.uint16)
    result = carray(at(result_at), (rows, 2, width), np.uint16)
    first, last = part(rows)
    for row in range(first, last):
        for column in range(width):
            gate, g = widen(x[row, 0, column]), widen(grad[row, column])
            sigmoid = ONE / (ONE + exp(-gate))
            silu = gate * sigmoid
            result[row, 1, column] = narrow(g * silu)
            slope = sigmoid + silu * (ONE - sigmoid)
            result[row, 0, column] = narrow(g * widen(x[row, 1, column]) * slope)


def _rms_norm(data: Any) -> None:
    numbers = carray(data, 7, np.int64)
    rows, width, eps = numbers[0], numbers[1], np.float32(np.int64(numbers[2]).view(np.float64))
    x_at, weight_at, result_at, scale_at = numbers[3], numbers[4], numbers[5], numbers[6]
    x, result = carray(at(x_at), (rows, width), np.uint16), carray(at(result_at), (rows, width), np.uint16)
    weight, scales = carray(at(weight_at), width, np.uint16), carray(at(scale_at), rows, np.float32)
    first, last = part(rows)
    for row in range(first, last):
        total = np.float32(0.0)
        for column in range(width):
            value = widen(x[row, column])
            total += value * value
        scale = ONE / np.sqrt(total / np.float32(width) + eps)
        scales[row] = scale
        for column in range(width):
            result[row, column] = narrow(widen(x[row, column]) * scale * widen(weight[column]))


def _rms_norm_backward(data: Any) -> None:
    numbers = carray(data, 8, np.int64)
    rows, width, x_at, grad_at = numbers[0], numbers[1], numbers[2], numbers[3]
    weight_at, scale_at, result_at, sums_at = numbers[4], numbers[5], numbers[6], numbers[7]
    x, grad = carray(at(x_at), (rows, width), np.uint16), carray(at(grad_at), (rows, width), np.uint16)
    weight, scales = carray(at(weight_at), width, np.uint16), carray(at(scale_at), rows, np.float32)
    result = carray(at(result_at), (rows, width), np.uint16)
    sums = carray(at(sums_at), (np.int64(num_threads()), width), np.float32)[thread_number()]
    first, last = part(rows)
    for row in range(first, last):
        scale, inner = scales[row], np.float32(0.0)
        for column in range(width):
            inner += widen(grad[row, column]) * widen(weight[column]) * widen(x[row, column])
        inner *= scale * scale / np.float32(width)
        for column in range(width):
            g, value = widen(grad[row, column]), widen(x[row, column])
            sums[column] += g * value * scale
            result[row, column] = narrow((g * widen(weight[column]) - value * inner) * scale)


def _softmax(data: Any) -> None:
    numbers = carray(data, 6, np.int64)
    rows, keys, queries, scale = numbers[0], numbers[1], numbers[2], np.float32(np.int64(numbers[3]).view(np.float64))
    scores_at, result_at = numbers[4], numbers[5]
    scores = carray(at(scores_at), (rows, keys), np.float32)
    result = carray(at(result_at), (rows, keys), np.uint16)
    first, last = part(rows)
    for row in range(first, last):
        seen = keys - queries + 1 + row % queries
        most, total = LEAST, np.float32(0.0)
        for key in range(seen):
            most = np.int32(max(most, ordered(scores[row, key])))
        highest = np.int32(ordered(np.int32(most).view(np.float32))).view(np.float32)
        for key in range(seen):
            weight = exp((scores[row, key] - highest) * scale)
            scores[row, key] = weight
            total += weight
        shrink = ONE / total
        for key in range(seen):
            result[row, key] = narrow(scores[row, key] * shrink)
        for key in range(seen, keys):
            result[row, key] = np.uint16(0)


def _add(data: Any) -> None:
    numbers = carray(data, 4, np.int64)
    rows, width, values_at, total_at = numbers[0], numbers[1], numbers[2], numbers[3]
    values, total = carray(at(values_at), (rows, width), np.uint16), carray(at(total_at), (rows, width), np.float32)
    first, last = part(rows)
    for row in range(first, last):
        for column in range(width):
            total[row, column] += widen(values[row, column])


def _score(data: Any) -> None:
    numbers = carray(data, 7, np.int64)
    rows, width, stride, scale = numbers[0], numbers[1], numbers[2], np.float32(np.int64(numbers[3]).view(np.float64))
    keep, logits_at, sums_at = numbers[4], numbers[5], numbers[6]
    logits, sums = carray(at(logits_at), (rows, stride), np.uint16), carray(at(sums_at), (3, rows), np.float32)
    first, last = part(rows)
    for row in range(first, last):
        most, total, weighted = LEAST, np.float32(0.0), np.float32(0.0)
        for column in range(width):
            most = np.int32(max(most, ordered(widen(logits[row, column]))))
        highest = np.int32(ordered(np.int32(most).view(np.float32))).view(np.float32) * scale
        for column in range(width):
            z = widen(logits[row, column]) * scale
            weight = exp(z - highest)
            total += weight
            weighted += weight * z
            if keep:
                logits[row, column] = narrow(weight)
        sums[0, row], sums[1, row], sums[2, row] = highest, total, weighted


def _few_products(data: Any) -> None:
    numbers = carray(data, 5, np.int64)
    rows, width, matrix_at, inputs_at, result_at = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    matrix = carray(at(matrix_at), (rows, width), np.uint16)
    inputs = carray(at(inputs_at), (PRODUCT_ROWS, width), np.float32)
    result = carray(at(result_at), (PRODUCT_ROWS, rows), np.float32)
    first, last = part(rows)
    for row in range(first, last):
        sum0, sum1, sum2, sum3 = ZERO, ZERO, ZERO, ZERO
        for column in range(width):
            value = widen(matrix[row, column])
            sum0 += value * inputs[0, column]
            sum1 += value * inputs[1, column]
            sum2 += value * inputs[2, column]
            sum3 += value * inputs[3, column]
        result[0, row], result[1, row], result[2, row], result[3, row] = sum0, sum1, sum2, sum3


swiglu = Kernel(_swiglu)
"""Computes silu(gate) up: rows, width, x [rows, 2 width], result [rows, width]."""
swiglu_backward = Kernel(_swiglu_backward)
"""Computes its gradient: rows, width, x [rows, 2 width], gradient [rows, width], result [rows, 2 width]."""
rms_norm = Kernel(_rms_norm)
"""Computes w x / sqrt(mean(x^2) + eps): rows, width, eps, x [rows, width], w [width], result [rows, width] and, in
float32, 1 / sqrt(mean(x^2) + eps) [rows]."""
rms_norm_backward = Kernel(_rms_norm_backward)
"""Computes its gradients: rows, width, x, gradient [rows, width], w, the float32 [rows] of `rms_norm`, result
[rows, width] and, in float32, what each thread adds to w's gradient [threads, width]."""
softmax = Kernel(_softmax)
"""Computes causal attention weights: rows, keys, queries, factor, scores [rows, keys] in float32, which are
overwritten, and result [rows, keys]. Of each `queries` rows, the last sees all keys, the one before all but the last
key, and so on; scores are multiplied by the factor."""
add = Kernel(_add)
"""Adds to a float32 sum: rows, width, values [rows, width], sum [rows, width]."""
score = Kernel(_score)
"""Sums over a vocabulary: rows, width, stride between rows, factor f, whether to keep weights, logits x [rows, width]
and result [3, rows] in float32. The results are m = max f x, sum e^(f x - m) and sum f x e^(f x - m); e^(f x - m) takes
the place of the logits if it is to be kept."""
few_products = Kernel(_few_products)
"""Multiplies a matrix with a few rows, reading it once: rows of the matrix, width, matrix [rows, width] and, in
float32, `PRODUCT_ROWS` inputs [PRODUCT_ROWS, width] and result [PRODUCT_ROWS, rows]."""
