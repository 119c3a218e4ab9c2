"""The memory that a training step takes at its real size, on a machine that has neither a GPU nor this memory.

Tensors are PyTorch's fake ones, which have shapes and no data, and the bytes of the storages that live are added up.
A CPU build of PyTorch has no autograd for tensors on "cuda": these are on "cpu", and what is chosen by the device is
chosen here as on a GPU. Of Transformer Engine there are stand-ins that keep the tensors that it keeps for the backward
pass. Its workspaces, its FP8 copies and cuDNN's, NCCL's buffers and the allocator's fragments are not counted.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Adds up the storages of fake tensors, and answers 1 to whoever asks for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        self._reduce_op: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        if func.namespace == "c10d" and "coalesced" in str(func):  # these have no fake version
            self._reduce_op = args[3] if "reduce_scatter" in str(func) else self._reduce_op
            return torch.ops.c10d.allreduce_.default(args[0], args[2], self._reduce_op, None, False, -1)[1]
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, FakeTensor):
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._remove, key, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def peak_of(self, run: Callable[[], object]) -> int:
        """The most bytes at once while it runs, beyond those from before; its result is thrown away."""
        gc.collect()
        before = self.peak = self.now
        run()
        gc.collect()
        return self.peak - before


@contextmanager
def counted() -> Iterator[LiveBytes]:
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        yield live


class Kept(torch.autograd.Function):
    """A stand-in for a fused operation: of a new tensor like its first input, which keeps some for the backward pass.

    The gradients of its inputs are new tensors.
    """

    @staticmethod
    def forward(ctx: Any, kept: int, *inputs: Tensor) -> Tensor:
        first = inputs[0]
        found = torch.empty_like(first, memory_format=torch.contiguous_format)
        statistics = [first.new_empty(first.shape[:-1], dtype=torch.float32)] if kept else []
        ctx.save_for_backward(*inputs[:kept], *statistics, *([found] if kept > 2 else []))
        ctx.like = [(x.shape, x.dtype) for x in inputs]
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, *(grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Transformer Engine's norm keeps its input, a number for each row, and the weight."""
    return Kept.apply(2, x, weight)  # type: ignore[no-any-return, no-untyped-call]


def rotate(x: Tensor) -> Tensor:
    """Its rotary embedding keeps nothing of the size of its input."""
    return Kept.apply(0, x)  # type: ignore[no-any-return, no-untyped-call]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its attention keeps queries, keys, values, the output and a number for each head and query."""
    return Kept.apply(3, q, k, v)  # type: ignore[no-any-return, no-untyped-call]
