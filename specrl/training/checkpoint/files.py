"""A copy of tensors in host memory, checksums of files, and flushing of folders to disk."""

from __future__ import annotations

import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""The bytes read at a time."""

PAGE = mmap.PAGESIZE


class HostCopy:
    """A copy of named tensors in one reused buffer of host memory, which is pinned if they are on a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], Any] = lambda: None

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors and return the copies by name, overwriting those of the last call."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if len(self._buffer) != size:
            self._unpin()
            around = torch.empty(size + 2 * PAGE, dtype=torch.uint8)  # shares no page with other pinned memory
            self._buffer = around[-around.data_ptr() % PAGE :][:size]
            if any(tensor.is_cuda for tensor in tensors.values()):
                self._pin()
        copies, offset = dict[str, Tensor](), 0
        # The widest elements come first, so that all tensors are aligned.
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
            part = self._buffer[offset : offset + tensor.nbytes]
            copies[name] = part.view(tensor.dtype).view(tensor.shape)
            copies[name].copy_(tensor, non_blocking=True)
            offset += tensor.nbytes
        if self._buffer.is_pinned():
            torch.cuda.synchronize()
        return copies

    def _pin(self) -> None:
        # torch rounds its own pinned memory up to a power of two, here up to twice the planned size.
        cuda, address = torch.cuda.cudart(), self._buffer.data_ptr()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cuda.cudaHostRegister(address, len(self._buffer), 0))
        self._unpin = weakref.finalize(self, cuda.cudaHostUnregister, address)


def checksum_of(path: Path) -> int:
    """The CRC-32 of a file."""
    buffer, checksum = memoryview(bytearray(CHUNK_BYTES)), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
    return checksum


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
