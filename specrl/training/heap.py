"""Memory of a process: kept while passes over a model allocate and free the same sizes, or not taken before its use.

The C library gives freed memory back to the system as soon as much of it is free. On a CPU each micro-batch would then
have its activations' pages mapped and zeroed anew.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 2**30
"""Both thresholds, in bytes, while memory is kept."""
USUAL = 2**25
"""Above this size, in bytes, the C library maps memory for a single tensor; it arrives at this threshold by itself."""
KEPT = 3 * 2**29
"""The most free memory, in bytes, that stays in the heap from a refit to the next update; the plan of a rank counts
it."""


class _Usage(ctypes.Structure):
    """What the C library says of its heap, in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@contextmanager
def kept(*, left: float = 0) -> Iterator[None]:
    """Keep what is freed inside the block for the allocations that follow, and give it back at the end.

    Nothing happens where the C library is not glibc.

    Args:
        left: The most free memory, in bytes, that stays in the heap behind the block; where there is more, all is given
            back. Where another block follows, pages need not be mapped again.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "mallinfo2"):
        yield
        return
    library.mallinfo2.restype = _Usage
    library.mallopt(M_MMAP_THRESHOLD, LARGEST)
    library.mallopt(M_TRIM_THRESHOLD, LARGEST)
    try:
        yield
    finally:
        library.mallopt(M_MMAP_THRESHOLD, USUAL)
        if library.mallinfo2().fordblks > left:
            library.mallopt(M_TRIM_THRESHOLD, 2 * USUAL)
            library.malloc_trim(0)


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU, of which the system gives each page when it is first used.

    `torch.zeros` writes to all of them at once, which takes long where a virtual machine has to get the memory from its
    host.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # holds the memory
