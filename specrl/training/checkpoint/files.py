"""Safetensors files written with few large writes and checksums, beside work that must not wait for them.

The library would copy every tensor to bytes and hold Python's lock while it writes, which stops the generation that
goes on meanwhile. The format is simple enough to be written here; it is read with the library.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 64 * 2**20
"""The bytes that are written, and covered by a checksum, at a time."""
TYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}
"""The names of the element types in a safetensors header."""


def header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """The header of a safetensors file whose tensors, given by type and shape, follow each other without gaps."""
    entries, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + prod(shape) * (4 if dtype == "F32" else 8)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def tensor_parts(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    described = {name: (TYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    return [memoryview(header(described)), *(bytes_of(tensor) for tensor in tensors.values())]


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
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
