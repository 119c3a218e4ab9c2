"""The exchange of arrays between ranks: rows of different lengths go to the ranks that need them, and to no others.

Nothing is pickled. Arrays travel as bytes through the group's CPU backend, so that any NumPy type can be sent, and GPUs
hold none of it. What is on its way takes at most `CHUNK_BYTES` in each direction, or one row where that is larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, DTypeLike, NDArray

from specrl.distributed.ranks import Ranks

CHUNK_BYTES = 64 * 2**20
"""The number of bytes of a message above which rows are sent in another one."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one array, for instance one row of tokens for each response.

    An item of a row may be an array itself, such as the experts of each layer for one token: all items have one shape.
    """

    values: Array
    """[sum of lengths, *item shape]: the rows, one after another."""
    lengths: NDArray[np.int64]
    """[rows]: the number of items of each row."""
    starts: NDArray[np.int64]
    """[rows]: the position in `values` of the first item of each row."""

    @classmethod
    def of(cls, rows: Sequence[ArrayLike], dtype: DTypeLike, item_shape: tuple[int, ...] = ()) -> Ragged:
        """Copy rows into one array.

        Args:
            rows: The rows; each is [length, *item_shape].
            dtype: The type of the values.
            item_shape: The shape of an item of a row; a number by default.
        """
        arrays = [np.asarray(row, dtype).reshape(-1, *item_shape) for row in rows]
        empty = np.empty((0, *item_shape), dtype)
        return cls._from(np.concatenate([empty, *arrays]), np.array([len(row) for row in arrays], np.int64))

    @classmethod
    def with_room(cls, like: Ragged, lengths: NDArray[np.int64]) -> Ragged:
        """Return uninitialised rows of these lengths, with the type and item shape of `like`."""
        return cls._from(np.empty((int(lengths.sum()), *like.values.shape[1:]), like.values.dtype), lengths)

    @classmethod
    def _from(cls, values: Array, lengths: NDArray[np.int64]) -> Ragged:
        return cls(values, lengths, np.cumsum(lengths) - lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Array:
        """Return a view of a row, [length, *item shape]."""
        start = self.starts[row]
        return self.values[start : start + self.lengths[row]]

    def __iter__(self) -> Iterator[Array]:
        return (self[row] for row in range(len(self)))

    @property
    def item_bytes(self) -> int:
        """The number of bytes of one item of a row."""
        return self.values.dtype.itemsize * int(np.prod(self.values.shape[1:], dtype=np.int64))


@dataclass(frozen=True)
class Route:
    """Which rank sends which rows to which others. It is the same on every rank."""

    sender: NDArray[np.int64]
    """[rows]: the rank that sends the row to those that want it and do not hold it."""
    wanted: Sequence[NDArray[np.int64]]
    """By rank: the numbers of the rows that the rank wants, in the order in which it wants them."""
    held: Sequence[NDArray[np.int64]]
    """By rank: the numbers of the rows that the rank holds already, in ascending order."""

    def messages(self, sender: int, receiver: int) -> NDArray[np.int64]:
        """Return the positions in `wanted` of the receiver at which the rows stand that the sender sends it."""
        wanted = self.wanted[receiver]
        if sender == receiver:
            return np.flatnonzero(np.isin(wanted, self.held[receiver]))
        missing = (self.sender[wanted] == sender) & ~np.isin(wanted, self.held[receiver])
        return np.flatnonzero(missing)


def deliver(ranks: Ranks, columns: Mapping[str, Ragged], route: Route) -> dict[str, Ragged]:
    """Send rows of several columns to the ranks that want them (collective).

    Args:
        columns: By name, one row for each entry of `route.held` of this rank, in that order. Every rank names the same
            columns in the same order with the same types and item shapes, also where it holds no rows. Rows of
            different columns may have different lengths.

    Returns:
        The columns of the rows that this rank wants, in the order of `route.wanted`.
    """
    held, wanted = route.held[ranks.rank], route.wanted[ranks.rank]
    assert all(len(column) == len(held) for column in columns.values()), "a row for each one that is held"
    peers = _peers(ranks, route)
    lengths = np.empty((len(wanted), len(columns)), np.int64)
    own = np.stack([column.lengths for column in columns.values()], axis=1) if len(held) else lengths[:0]
    local = route.messages(ranks.rank, ranks.rank)
    lengths[local] = own[np.searchsorted(held, wanted[local])]
    for peer in peers:  # the lengths first: only then is there room for the rows
        incoming = np.empty((len(peer.receives), len(columns)), np.int64)
        _swap(peer, _bytes(own[peer.sends]), _bytes(incoming))
        lengths[peer.receives] = incoming
    found = {
        name: Ragged.with_room(column, np.ascontiguousarray(lengths[:, i]))
        for i, (name, column) in enumerate(columns.items())
    }
    for name, column in columns.items():
        for position in local:
            found[name][position][:] = column[int(np.searchsorted(held, wanted[position]))]
    sources, targets = list(columns.values()), list(found.values())
    for peer in peers:
        _send_and_receive(peer, sources, targets)
    return found


def gather_columns(ranks: Ranks, columns: Mapping[str, Array]) -> tuple[dict[str, Array], NDArray[np.int64]]:
    """Return the entries of all ranks, in rank order, on every rank, and the rank that each is from (collective).

    Args:
        columns: Arrays with one entry for each item of this rank; every rank has the same names and types.
    """
    counts = gather_rows(ranks, np.array([len(next(iter(columns.values())))], np.int64))[:, 0]
    sizes = [column.dtype.itemsize for column in columns.values()]
    buffer = np.zeros(int(counts.max()) * sum(sizes), np.uint8)
    own = np.concatenate([_bytes(np.ascontiguousarray(column)) for column in columns.values()])
    buffer[: len(own)] = own
    gathered = gather_rows(ranks, buffer)
    found: dict[str, list[Array]] = {name: [] for name in columns}
    for row, count in zip(gathered, counts, strict=True):
        start = 0
        for (name, column), size in zip(columns.items(), sizes, strict=True):
            found[name].append(row[start : start + count * size].copy().view(column.dtype))
            start += count * size
    origin = np.repeat(np.arange(ranks.world_size, dtype=np.int64), counts)
    return {name: np.concatenate(parts) for name, parts in found.items()}, origin


def gather_rows(ranks: Ranks, row: Array) -> Array:
    """Return the arrays of all ranks, which have one shape, as [ranks, *shape] on every rank (collective)."""
    gathered = np.empty((ranks.world_size, *row.shape), row.dtype)
    if ranks.world_size == 1:
        gathered[0] = row
    elif row.size:
        parts = [torch.from_numpy(_bytes(part)) for part in gathered]
        dist.all_gather(parts, torch.from_numpy(_bytes(np.ascontiguousarray(row))))
    return gathered


def sum_arrays(ranks: Ranks, values: Array) -> Array:
    """Return the sum of the arrays of all ranks, which have one shape and type, on every rank (collective)."""
    total = np.array(values)
    if ranks.world_size > 1:
        dist.all_reduce(torch.from_numpy(total))
    return total


@dataclass(frozen=True)
class _Peer:
    """What this rank exchanges in one round: it sends to one rank and receives from another."""

    to: int
    sends: NDArray[np.int64]
    """The positions in what this rank holds."""
    source: int
    receives: NDArray[np.int64]
    """The positions in what this rank wants."""


def _peers(ranks: Ranks, route: Route) -> list[_Peer]:
    """Return this rank's rounds: in round i it sends to the i-th rank after it and receives from the i-th before it.

    Every rank goes through the rounds in the same order, so none waits for one that waits for it.
    """
    held, found = route.held[ranks.rank], []
    for distance in range(1, ranks.world_size):
        to, source = (ranks.rank + distance) % ranks.world_size, (ranks.rank - distance) % ranks.world_size
        sent = route.wanted[to][route.messages(ranks.rank, to)]
        assert np.isin(sent, held).all(), "a rank sends only what it holds"
        peer = _Peer(to, np.searchsorted(held, sent), source, route.messages(source, ranks.rank))
        if len(peer.sends) or len(peer.receives):
            found.append(peer)
    return found


def _send_and_receive(peer: _Peer, sources: list[Ragged], targets: list[Ragged]) -> None:
    """Exchange the rows of one round, chunk by chunk."""
    outgoing, incoming = _chunks(sources, peer.sends), _chunks(targets, peer.receives)
    for number in range(max(len(outgoing), len(incoming))):
        sends = _views(sources, outgoing[number]) if number < len(outgoing) else []
        receives = _views(targets, incoming[number]) if number < len(incoming) else []
        sent = np.concatenate([_NOTHING, *sends])
        received = np.empty(sum(len(view) for view in receives), np.uint8)
        _swap(peer, sent, received)
        start = 0
        for view in receives:
            view[:] = received[start : start + len(view)]
            start += len(view)


def _chunks(columns: list[Ragged], rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Cut rows into runs of at most `CHUNK_BYTES`, and of one row at least."""
    if not len(rows):
        return []
    sizes = sum(column.lengths[rows] * column.item_bytes for column in columns)
    cuts, total = [], 0
    for position, size in enumerate(np.asarray(sizes).tolist()):
        if total and total + size > CHUNK_BYTES:
            cuts.append(position)
            total = 0
        total += size
    return np.split(rows, cuts)


def _views(columns: list[Ragged], rows: NDArray[np.int64]) -> list[Array]:
    return [_bytes(column[int(row)]) for row in rows for column in columns]


def _swap(peer: _Peer, sent: Array, received: Array) -> None:
    """Send bytes to one peer and fill `received` from the other, whichever of the two have any."""
    works = []
    if received.size:
        works.append(dist.irecv(torch.from_numpy(received), peer.source))
    if sent.size:
        works.append(dist.isend(torch.from_numpy(sent), peer.to))
    for work in works:
        if work is not None:
            work.wait()


def _bytes(array: Array) -> Array:
    """Return a flat view of the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


_NOTHING = np.empty(0, np.uint8)
