"""Counts what ranks exchange and what memory is alive while a function runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specrl.training.megatron.policy import Policy


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank receives in broadcasts over pipeline stages and in gathers, and new memory."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._stage = policy.pp_rank
        self.broadcast_bytes = self.gathered_bytes = self.peak_bytes = 0
        self._known = {parameter.untyped_storage()._cdata for parameter in policy.model.parameters()}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.broadcast_.default and args[2] != self._stage:
            self.broadcast_bytes += sum(tensor.nbytes for tensor in args[0])
        elif func is torch.ops.c10d._allgather_base_.default:
            self.gathered_bytes += args[0].nbytes - args[1].nbytes
        self._note(result)
        return result

    def _note(self, result: Any) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self._alive.values()))


def refit_traffic(policy: Policy) -> dict[str, int]:
    """What this rank receives and holds while the policy's weights go to all ranks (collective)."""
    with Traffic(policy) as traffic:
        for _ in policy.hf_weights():
            pass
    return {
        "stage_bytes": traffic.broadcast_bytes,
        "rank_bytes": traffic.gathered_bytes,
        "peak_bytes": traffic.peak_bytes,
    }
