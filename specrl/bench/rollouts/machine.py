"""Measure the memory bandwidth and the matrix rate of this machine, with the benchmark's threads."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from specrl.bench.arithmetic import Machine
from specrl.models.shapes import ModelShape

READ_BYTES = 1 << 29
"""The size of the tensor that is read, 512 MiB, which no cache holds."""
ROWS = 512
"""The number of rows of the timed matrix product."""
REPEATS = 5


def measure(hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device) -> Machine:
    """Return the best of a few tries, because other work on the machine can only slow a try down.

    Args:
        hidden: The hidden size of the policy; with `intermediate`, the shape of the product that is timed.
    """
    memory = torch.ones(READ_BYTES // 4, device=device)
    rows = torch.randn(ROWS, hidden, device=device, dtype=dtype)
    weights = torch.randn(hidden, intermediate, device=device, dtype=dtype)
    products = max(1, 10**10 // (2 * ROWS * hidden * intermediate))

    def multiply() -> None:
        for _ in range(products):
            rows @ weights

    read = _best(lambda: float(memory.sum()), device)
    return Machine(READ_BYTES / read, products * 2 * ROWS * hidden * intermediate / _best(multiply, device))


def measure_machine(shape: ModelShape, threads: int) -> Machine:
    """Return this machine's rates with so many threads, its matrix rate on products of this shape as in a rank."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found = measure(shape.hidden_size, shape.intermediate_size, torch.bfloat16, torch.device("cpu"))
    torch.set_num_threads(before)
    return found


def _best(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
