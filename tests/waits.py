"""Counts what makes the host wait for a device, on CPUs too, where nothing has to wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
"""What returns a number, or a tensor whose size depends on numbers."""
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""What looks for the True places of a mask that it is given as an index."""
READ = {Tensor.numpy, Tensor.tolist, Tensor.cpu}
"""What reads a tensor on the host, and is no operation where that is on the host already."""


class _Operations(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [leaf for leaf in tree_leaves(args[1:2]) if isinstance(leaf, Tensor) and leaf.dtype == torch.bool]
        if func in WAITS or (func in INDEXED and masks):
            self._found[str(func)] += 1
        result = func(*args, **(kwargs or {}))
        if func in (aten._to_copy.default, aten.copy_.default):  # on a GPU
            source = next(leaf for leaf in tree_leaves(args[-1:]) if isinstance(leaf, Tensor))
            self._found["copies to the host"] += source.is_cuda and not result.is_cuda
        return result


class _Methods(TorchFunctionMode):
    def __init__(self, found: Counter[str], on_host: set[int]) -> None:
        super().__init__()
        self._found, self._on_host = found, on_host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READ and args[0].data_ptr() not in self._on_host:
            self._found[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(found: Counter[str], on_host: list[Tensor] | None = None) -> Iterator[None]:
    """Count what happens inside the block, by name.

    Args:
        on_host: Tensors that are in host memory on GPUs, too.
    """
    with _Methods(found, {tensor.data_ptr() for tensor in on_host or []}), _Operations(found):
        yield
    for name in [name for name, count in found.items() if not count]:
        del found[name]
