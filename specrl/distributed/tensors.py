"""Sums and copies of large tensors on CPUs, between the ranks of a group.

Ranks on one node read each other's tensors from memory that all of them map, a part at a time; through loopback, every
byte would be copied several times. Ranks on several nodes send the parts through the process group. Either way a sum is
added up in an order that depends on nothing but the ranks' numbers.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

WINDOW_BYTES = 2**24
"""The memory through which a group of ranks on one node exchanges; so little that it stays in the processor's cache."""
MESSAGE_BYTES = 2**24
"""The number of bytes that are sent to another node at a time."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""What tells one node from another, in containers too."""
SPACE = Path("/proc/self/ns/pid")
"""What tells whether two processes on a node call a third one by the same number."""


class SharedWindow:
    """Memory that all ranks of a group map, in which each shows the others a part of a tensor at a time.

    Each rank has two slots and uses them in turn. So a rank that waits for the others once, after it has written, finds
    what they have written, and none of them is still reading what it overwrites next.

    Args:
        memory: `WINDOW_BYTES`, the same for all ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup, memory: mmap.mmap) -> None:
        self._group = group
        ranks = group.size()
        self.slot_bytes = WINDOW_BYTES // (2 * ranks) // 64 * 64
        used = torch.frombuffer(memory, dtype=torch.uint8)[: 2 * ranks * self.slot_bytes]
        self._slots = used.view(2, ranks, self.slot_bytes)
        self._turn = 0

    def show(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return what each rank shows, by rank: [rows, n] (collective). It stays there until the next call.

        Args:
            rows: Tensors [n] of one type, at most `slot_bytes` together; the same number, length and type on all ranks.
        """
        self._turn = 1 - self._turn
        shape, dtype = (len(rows), len(rows[0])), rows[0].dtype
        used = len(rows) * rows[0].nbytes
        shown = [slot[:used].view(dtype).view(shape) for slot in self._slots[self._turn]]
        for place, row in zip(shown[self._group.rank()], rows, strict=True):
            place.copy_(row)
        dist.barrier(self._group)
        return shown


@cache
def window_of(group: dist.ProcessGroup) -> SharedWindow | None:
    """Return the window of a group; None if its ranks are not all on one node (collective, when first called).

    Its memory belongs to no file: it is gone with the last process that maps it, however that ends.
    """
    is_first = group.rank() == 0
    created = os.memfd_create("specrl-window") if is_first else -1
    if is_first:
        os.ftruncate(created, WINDOW_BYTES)
    places: list[tuple[str, int, int]] = [("", 0, 0)] * group.size()
    dist.all_gather_object(places, (_node(), os.getpid(), created), group=group)
    memory = _opened(*places[0]) if len({node for node, _, _ in places}) == 1 else None
    mapped = [False] * group.size()
    dist.all_gather_object(mapped, memory is not None, group=group)
    if is_first:
        os.close(created)
    return SharedWindow(group, memory) if memory is not None and all(mapped) else None


def _node() -> str:
    """Return a text that is the same for processes of one node that see each other, and for no others."""
    if not BOOT.exists() or not SPACE.exists():
        return f"alone, {os.urandom(8).hex()}"
    return f"{BOOT.read_text()} {SPACE.readlink()}"


def _opened(_: str, process: int, descriptor: int) -> mmap.mmap | None:
    """Map the memory that a process of this node has created; None if this process may not."""
    try:
        own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(own, WINDOW_BYTES)
    finally:
        os.close(own)


def reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """Give each rank the sum of its part of all ranks' inputs (collective).

    A rank's own part comes first, then those of the ranks before it, the nearest one first.

    Args:
        output: [n], which may be this rank's part of `input`.
        input: [ranks x n], contiguous.
    """
    rank, size = group.rank(), group.size()
    parts = input.view(size, -1)
    _copy(output, parts[rank])
    window = window_of(group) if size > 1 else None
    room = window.slot_bytes // max(size - 1, 1) if window is not None else MESSAGE_BYTES
    for some in _slices(output, room) if size > 1 else ():
        outgoing = [parts[(rank + distance) % size, some] for distance in range(1, size)]
        if window is None:
            received = _swap(outgoing, group)
        else:
            shown = window.show(outgoing)
            received = [shown[(rank - distance) % size][distance - 1] for distance in range(1, size)]
        for part in received:
            output[some].add_(part)


def all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """Give each rank the inputs of all ranks (collective).

    Args:
        output: [ranks x n], contiguous.
        input: [n], which may be this rank's part of `output`.
    """
    rank, size = group.rank(), group.size()
    parts = output.view(size, -1)
    if size == 1:
        _copy(parts[rank], input)
        return
    window = window_of(group)
    if window is None:
        dist.all_gather_into_tensor(output, input, group=group)
        return
    _copy(parts[rank], input)
    for some in _slices(input, window.slot_bytes):
        for other, shown in enumerate(window.show([input[some]])):
            if other != rank:
                parts[other, some] = shown[0]


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Replace a contiguous tensor on each rank by the sum of all ranks' (collective); GPUs leave that to NCCL."""
    if group.size() == 1:
        return
    window = None if tensor.is_cuda else window_of(group)
    if window is None:
        dist.all_reduce(tensor, group=group)
        return
    flat = tensor.view(-1)
    for some in _slices(flat, window.slot_bytes):
        first, second, *others = window.show([flat[some]])
        torch.add(first[0], second[0], out=flat[some])
        for other in others:
            flat[some] += other[0]


def _swap(outgoing: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Send the i-th tensor to the i-th rank after this one, and return what the i-th rank before it sent here."""
    rank, size = group.rank(), group.size()
    received = [torch.empty_like(part) for part in outgoing]
    works = []
    for distance, (sent, got) in enumerate(zip(outgoing, received, strict=True), 1):
        works.append(dist.irecv(got, group=group, group_src=(rank - distance) % size))
        works.append(dist.isend(sent, group=group, group_dst=(rank + distance) % size))
    for work in works:
        assert work is not None, "every rank is in the group"
        work.wait()
    return received


def _slices(flat: Tensor, room: int) -> list[slice]:
    """Return the slices of a tensor [n], each of at most `room` bytes."""
    step = max(room // flat.element_size(), 1)
    return [slice(start, min(start + step, len(flat))) for start in range(0, len(flat), step)]


def _copy(output: Tensor, input: Tensor) -> None:
    if output.data_ptr() != input.data_ptr():
        output.copy_(input)
