"""Copies in host memory of what is trained, in buffers that are filled again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from specrl.training.checkpoint.files import bytes_of, header
from specrl.training.checkpoint.manifest import stored_name
from specrl.training.checkpoint.pieces import Piece, Shard


class HostTensors:
    """Copies of named tensors in host memory, pinned where the tensors are on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors and return the copies, which are those of the last call, filled again, where they fit."""
        buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            buffers[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._buffers = buffers
        return dict(buffers)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        known = self._buffers.get(name)
        if known is not None and (known.shape, known.dtype) == (tensor.shape, tensor.dtype):
            return known
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class HostCopy:
    """A copy of a rank's share of the optimizer's state, in the order in which a file holds it.

    It is one buffer, pinned where there is a GPU, that is filled again for every checkpoint. On a CPU the system gives
    its memory when it is first filled. The optimizer updates its tensors in place, and the next update may begin before
    a checkpoint is written.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
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
        return [memoryview(self._header), bytes_of(self._buffer)]
