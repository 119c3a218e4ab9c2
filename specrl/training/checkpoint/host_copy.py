"""A copy of a rank's share of the optimizer's state in host memory, in the order in which a file holds it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specrl.training.checkpoint.files import bytes_of, header
from specrl.training.checkpoint.manifest import stored_name
from specrl.training.checkpoint.pieces import Piece, Shard


class HostCopy:
    """One buffer in host memory, pinned where there is a GPU, that is filled again for every checkpoint.

    The optimizer updates its tensors in place, and the next update may begin before a checkpoint is written.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        """Allocate the buffer.

        Args:
            shards: This rank's shards, whose tensors must stay the same ones.
        """
        written = [shard for shard in shards if shard.is_written]
        self.pieces: tuple[Piece, ...] = tuple(piece for shard in written for piece in shard.pieces)
        """What the copy holds of the policy."""
        self._sources: list[Tensor] = [flat for shard in written for flat in shard.state.values()]
        names = (
            (stored_name(kind, piece), piece.shape)
            for shard in written
            for kind in shard.state
            for piece in shard.pieces
        )
        self._header = header({name: ("F32", shape) for name, shape in names})
        on_gpu = any(flat.is_cuda for flat in self._sources)
        self._buffer = torch.empty(sum(flat.numel() for flat in self._sources), pin_memory=on_gpu)
        self._buffer.zero_()  # so that the system gives the memory now and not while a step waits

    @torch.no_grad()
    def take(self) -> None:
        """Copy the present state; `parts` changes with it."""
        offset = 0
        for flat in self._sources:
            self._buffer[offset : offset + flat.numel()].copy_(flat, non_blocking=True)
            offset += flat.numel()
        if self._buffer.is_pinned():
            torch.cuda.synchronize()

    def parts(self) -> list[memoryview]:
        """Return the contents of a safetensors file with the copy, without copying it again."""
        return [memoryview(self._header), bytes_of(self._buffer)]
