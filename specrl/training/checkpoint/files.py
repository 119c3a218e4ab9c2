"""A copy in host memory, and its safetensors file, written with checksums beside work that must not wait for it.

The library would copy every tensor to bytes and hold Python's lock while it writes, which stops the generation that
goes on meanwhile. The format is simple enough to be written here; it is read with the library.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 64 * 2**20
"""The bytes that are written, and covered by a checksum, at a time."""
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


def write_blocks(path: Path, parts: Iterable[memoryview]) -> tuple[int, list[int]]:
    """Write a file, flush it to disk, and return its size in bytes and the CRC-32 of each `BLOCK_BYTES` of it."""
    size, checksums, checksum = 0, list[int](), 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            done = 0
            while done < len(part):
                room = BLOCK_BYTES - size % BLOCK_BYTES
                written = file.write(part[done : done + room])
                checksum = zlib.crc32(part[done : done + written], checksum)
                size, done = size + written, done + written
                if size % BLOCK_BYTES == 0:
                    checksums.append(checksum)
                    checksum = 0
        os.fsync(file.fileno())
    if size % BLOCK_BYTES:
        checksums.append(checksum)
    return size, checksums


def wrong_block(path: Path, checksums: Sequence[int], blocks: Iterable[int]) -> int | None:
    """The number of the first of some blocks of a file whose CRC-32 is another, or None."""
    buffer = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        for block in blocks:
            file.seek(block * BLOCK_BYTES)
            view, read = memoryview(buffer), 0
            while count := file.readinto(view[read:]):
                read += count
            if zlib.crc32(view[:read]) != checksums[block]:
                return block
    return None


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
