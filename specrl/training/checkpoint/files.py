"""A copy in host memory, and its safetensors file, written with a checksum beside work that must not wait for it.

The library would copy every tensor to bytes and hold Python's lock while it writes, which stops the generation that
goes on meanwhile. The format is simple enough to be written here; it is read with the library.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""The bytes that are read or written at a time."""
TYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


class HostCopy:
    """A copy of named tensors in one buffer of host memory, pinned where they are on a GPU, that is filled again."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors; the copies, by the same names, are those of the last call filled again."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if len(self._buffer) != size:
            on_gpu = any(tensor.is_cuda for tensor in tensors.values())
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        copies, offset = dict[str, Tensor](), 0
        # The widest elements come first, so that all are aligned.
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
            part = self._buffer[offset : offset + tensor.nbytes]
            copies[name] = part.view(tensor.dtype).view(tensor.shape)
            copies[name].copy_(tensor, non_blocking=True)
            offset += tensor.nbytes
        if self._buffer.is_pinned():
            torch.cuda.synchronize()
        return copies


def tensor_parts(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """The header and the bytes, without a copy, of a safetensors file with contiguous tensors on the CPU."""
    entries, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    arrays: list[Any] = [tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values()]
    return [memoryview(part) for part in (len(text).to_bytes(8, "little") + text, *arrays)]


def write_parts(path: Path, parts: Iterable[memoryview]) -> tuple[int, int]:
    """Write a file, flush it to disk, and return its size in bytes and its CRC-32."""
    size = checksum = 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            done = 0
            while done < len(part):
                written = file.write(part[done : done + CHUNK_BYTES])
                checksum = zlib.crc32(part[done : done + written], checksum)
                done += written
            size += done
        os.fsync(file.fileno())
    return size, checksum


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
