"""The ranks of a stage, and the data that they exchange.

Rows of different lengths go only to the ranks that need them. Arrays travel as bytes through the group's CPU backend,
so that any NumPy type can be sent without GPU memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch.distributed.distributed_c10d import Store, _get_default_store

from specrl.processes import free_port

Array = NDArray[Any]
VARIABLES = {
    "TORCH_GLOO_LAZY_INIT": "1",  # otherwise gloo connects all pairs at once, which takes minutes for hundreds of ranks
    # On CPUs each new shape of a BF16 product leaves half a megabyte of compiled code: a gigabyte by default.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "LRU_CACHE_CAPACITY": "256",
}
"""Environment variables of a rank, unless the user has set them."""
TIMEOUT = timedelta(days=7)
"""Far above gloo's half hour: the job's limits (`cluster.hang_minutes`, `cluster.start_minutes`) end a hang."""


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather[T](self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """The values of all ranks, in rank order, on every rank (collective); a thread needs its own group.

        Values are pickled, so pass only a few numbers and messages: data per response or token travels as arrays.
        """
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group)
        return values

    def store(self) -> Store:
        store: Store = _get_default_store()
        return store

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def join() -> Ranks:
    """Join the job's process group (NCCL on GPUs, gloo on CPUs) and pin this process to its device and threads.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are read as torchrun and submitit set them. Unset ones are
    set here, because vLLM reads them: to those of the group or, without one, of a single process.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    alone = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    cuda = torch.cuda.is_available()
    if torch.cuda.device_count() == 1:  # this rank sees only its own GPU
        os.environ["LOCAL_RANK"] = "0"
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    return Ranks(dist.get_rank(), dist.get_world_size(), local_rank, device)


def leave() -> None:
    """Wait for every rank, then leave the process group (collective)."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths and one type, for instance one row of tokens for each response.

    A row's items may themselves be arrays of one shape, such as the experts of each layer for one token.
    """

    rows: list[Array]  # each [length, *item_shape] and contiguous
    dtype: np.dtype[Any]
    item_shape: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[ArrayLike], dtype: DTypeLike, item_shape: tuple[int, ...] = ()) -> Ragged:
        """Rows [length, *item_shape], copied only if they are not contiguous arrays of this type."""
        kind = np.dtype(dtype)
        return cls([np.ascontiguousarray(row, kind).reshape(-1, *item_shape) for row in rows], kind, item_shape)

    def row_of_length(self, length: int) -> Array:
        return np.empty((length, *self.item_shape), self.dtype)


@dataclass(frozen=True)
class Route:
    """Which rank sends which rows to which others, the same on every rank."""

    sender: NDArray[np.int64]  # [rows]: the rank that sends a row to those that want it but do not hold it
    wanted: Sequence[NDArray[np.int64]]  # by rank: row numbers, in the wanted order
    held: Sequence[NDArray[np.int64]]  # by rank: row numbers, in ascending order

    def messages(self, sender: int, receiver: int) -> NDArray[np.int64]:
        """The positions, in the receiver's `wanted`, of the rows that the sender sends."""
        wanted = self.wanted[receiver]
        if sender == receiver:
            return np.flatnonzero(np.isin(wanted, self.held[receiver]))
        missing = (self.sender[wanted] == sender) & ~np.isin(wanted, self.held[receiver])
        return np.flatnonzero(missing)


def deliver(ranks: Ranks, columns: Mapping[str, Ragged], route: Route) -> dict[str, list[Array]]:
    """Send rows of several columns to the ranks that want them (collective).

    Columns have a row for each entry of this rank's `route.held`, and the same names, types and item shapes on every
    rank. Returns the rows of `route.wanted`; those that this rank holds are not copies and must not be changed.
    """
    held, wanted = route.held[ranks.rank], route.wanted[ranks.rank]
    assert all(len(column.rows) == len(held) for column in columns.values()), "a row for each one that is held"
    local = route.messages(ranks.rank, ranks.rank).tolist()
    places = np.searchsorted(held, wanted[local]).tolist()
    found: dict[str, list[Array]] = {}
    for name, column in columns.items():
        found[name] = [column.row_of_length(0)] * len(wanted)
        for position, place in zip(local, places, strict=True):
            found[name][position] = column.rows[place]
    sources, targets = list(columns.values()), list(found.values())
    own = np.array([[len(row) for row in column.rows] for column in sources], np.int64)  # [columns, rows]
    for distance in range(1, ranks.world_size):  # all ranks send equally far ahead, which avoids circular waits
        to, source = (ranks.rank + distance) % ranks.world_size, (ranks.rank - distance) % ranks.world_size
        asked = route.wanted[to][route.messages(ranks.rank, to)]
        assert np.isin(asked, held).all(), "a rank sends only what it holds"
        sends, receives = np.searchsorted(held, asked), route.messages(source, ranks.rank)
        lengths = np.empty((len(columns), len(receives)), np.int64)
        _swap(to, _bytes(np.ascontiguousarray(own[:, sends])), source, _bytes(lengths))
        for column, target, of_column in zip(sources, targets, lengths.tolist(), strict=True):
            for position, length in zip(receives.tolist(), of_column, strict=True):
                target[position] = column.row_of_length(length)
        sent = [_bytes(column.rows[place]) for place in sends.tolist() for column in sources]
        views = [_bytes(rows[position]) for position in receives.tolist() for rows in targets]
        received = np.empty(sum(map(len, views)), np.uint8)
        _swap(to, np.concatenate([np.empty(0, np.uint8), *sent]), source, received)
        for view, part in zip(views, np.split(received, np.cumsum([0, *map(len, views)])[1:]), strict=False):
            view[:] = part
    return found


def gather_columns(ranks: Ranks, columns: Mapping[str, Array]) -> tuple[dict[str, Array], NDArray[np.int64]]:
    """The entries of all ranks' columns, in rank order, and the rank of each (collective)."""
    counts = gather_rows(ranks, np.array([len(next(iter(columns.values())))], np.int64))[:, 0]
    found = {}
    for name, column in columns.items():
        padded = np.zeros(counts.max(), column.dtype)
        padded[: len(column)] = column
        found[name] = np.concatenate(
            [row[:count] for row, count in zip(gather_rows(ranks, padded), counts, strict=True)]
        )
    origin = np.repeat(np.arange(ranks.world_size, dtype=np.int64), counts)
    return found, origin


def gather_rows(ranks: Ranks, row: Array) -> Array:
    """The arrays of all ranks, all of one shape, as [ranks, *shape] on every rank (collective)."""
    gathered = np.empty((ranks.world_size, *row.shape), row.dtype)
    if ranks.world_size == 1:
        gathered[0] = row
    elif row.size:
        parts = [torch.from_numpy(_bytes(part)) for part in gathered]
        dist.all_gather(parts, torch.from_numpy(_bytes(np.ascontiguousarray(row))))
    return gathered


def sum_arrays(ranks: Ranks, values: Array) -> Array:
    """The sum of the arrays of all ranks, all of one shape and type, on every rank (collective)."""
    total = np.array(values)
    if ranks.world_size > 1:
        dist.all_reduce(torch.from_numpy(total))
    return total


def _swap(to: int, sent: Array, source: int, received: Array) -> None:
    works = [dist.irecv(torch.from_numpy(received), source)] if received.size else []
    works += [dist.isend(torch.from_numpy(sent), to)] if sent.size else []
    for work in works:
        if work is not None:
            work.wait()


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
