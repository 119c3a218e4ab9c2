"""Megatron's process groups, which are set up once per process and shared by all its policies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from specrl.distributed import TIMEOUT


def set_up(tensor: int, pipeline: int, expert: int, seed: int) -> None:
    """Split the ranks into tensor x pipeline x data parallel groups, unless this was done before (collective).

    Tensor parallelism does not split experts: the tensor x data parallel ranks of a pipeline stage are split into
    groups, each of which holds all experts.
    """
    if parallel_state.model_parallel_is_initialized():
        current = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        assert current == (tensor, pipeline, expert), f"another layout, {current}, needs a process of its own"
        return
    with _one_group_for_equal_ranks():
        parallel_state.initialize_model_parallel(
            tensor,
            pipeline,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=int(TIMEOUT.total_seconds() // 60),
        )
    with torch.random.fork_rng(devices=[]):
        # Registers the random states that Megatron's layers require; without dropout nothing draws from them.
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


@contextmanager
def _one_group_for_equal_ranks() -> Iterator[None]:
    """Make Megatron create one process group where it would create several of the same ranks for different purposes.

    Without context parallelism most of them coincide, and a GPU allocates buffers for each group in use.
    """
    create = parallel_state.create_group
    made: dict[tuple[Any, ...], Any] = {}

    def create_group(ranks: list[int], backend: str | None = None, **options: Any) -> Any:
        key = (*sorted(ranks), backend)
        if key not in made:
            made[key] = create(ranks, backend=backend, **options)
        return made[key]

    parallel_state.create_group = create_group
    try:
        yield
    finally:
        parallel_state.create_group = create


def from_stage(stage: int, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Broadcast a tensor from pipeline stage `stage`; all know its shape and type (collective)."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        assert tensor is not None
        return tensor
    if group.rank() == stage:
        assert tensor is not None and tuple(tensor.shape) == shape and tensor.dtype == dtype
        tensor = tensor.contiguous()
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        tensor = torch.empty(shape, dtype=dtype, device=device)
    dist.broadcast(tensor, dist.get_global_rank(group, stage), group=group)
    return tensor
