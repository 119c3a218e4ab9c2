"""What is replaced in vLLM before an engine starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from specrl import cpu_products
from specrl.training.heap import untouched_zeros

PRODUCT_SHAPES = 32
"""The number of shapes for which oneDNN keeps a layer's compiled product; vLLM's own number."""


def patch() -> None:
    """Replace everything that this file is about; a second call changes nothing."""
    from vllm.model_executor.models import registry

    fix_kernel_registration()
    _take_memory_as_needed()
    _own_shared_memory()
    pack_bf16_in_float32()
    # vLLM would look at each new model's class in a process that imports everything again, so as not to initialise
    # CUDA in this one; here the engine does that next.
    registry._run_in_subprocess = lambda inspect: inspect()


def fix_kernel_registration() -> None:
    """Let engines start after llvmlite was imported, as numba and so vLLM does, and more than one in a process.

    On CPUs vLLM looks for copies of its Triton kernels in every global of every module by `vars(value).get`, which
    takes seconds and fails at llvmlite's library handle: its `__dict__` is a foreign function. Here it looks in its own
    modules alone. One registration is enough.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    dispatcher.sys = _OwnModules()
    if dispatcher._registry:
        current_platform.register_triton_kernel_overrides = lambda: None


class _OwnModules:
    """Stands for `sys` where vLLM looks through all modules."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        """vLLM's own modules, by name."""
        found = sys.modules.copy()  # in one go, because other threads import while this one looks
        return {name: module for name, module in found.items() if name.partition(".")[0] == "vllm"}


def _take_memory_as_needed() -> None:
    """Let the KV cache of an engine on CPUs take memory as it is used; vLLM would write zeros to all of it at once."""
    from vllm.v1.worker import gpu_model_runner, utils

    allocate = utils.allocate_kv_cache

    def allocate_untouched(kv_cache_config: Any, device: torch.device, *arguments: Any) -> Any:
        zeros = torch.zeros
        if device.type == "cpu":
            torch.zeros = lambda size, dtype, device: untouched_zeros((size,), dtype)  # type: ignore[assignment]
        try:
            return allocate(kv_cache_config, device, *arguments)
        finally:
            torch.zeros = zeros

    gpu_model_runner.allocate_kv_cache = allocate_untouched


def _own_shared_memory() -> None:
    """Let the ranks of each tensor-parallel engine on CPUs share memory under a name that nobody else uses.

    vLLM makes the name of the ranks' numbers alone, so that two jobs on one machine would collide, and so would a job
    with what a killed one has left. Here the memory loses its name once all ranks have it, and ends with the last one.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    shared = cpu_communicator._CPUSHMDistributed
    if hasattr(shared, "specrl_names"):
        return
    shared.specrl_names = WeakKeyDictionary()
    init_shared_memory = shared._init_cpu_shm

    def make_group_name(communicator: Any) -> str:
        if communicator not in shared.specrl_names:
            name = [f"specrl-{uuid4().hex}"]
            dist.broadcast_object_list(name, src=communicator.ranks[0], group=communicator.cpu_group)
            shared.specrl_names[communicator] = name[0]
        return str(shared.specrl_names[communicator])

    def init_and_unlink(self: Any) -> int:
        handle = int(init_shared_memory(self))
        Path("/dev/shm", f"{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    shared.make_group_name = staticmethod(make_group_name)
    shared._init_cpu_shm = init_and_unlink


def pack_bf16_in_float32() -> None:
    """Let linear layers in BF16 compute in float32, on CPUs that have no products of BF16.

    vLLM leaves such layers to PyTorch there, which takes 64 times as long for 64 tokens as for one. Packed like this,
    weights take twice the memory.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or cpu_products.has_bf16():
        return
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    if pack.__module__ == __name__:
        return

    def pack_wide(layer: Any, remove_weight: bool) -> None:
        weight: torch.Tensor = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.bfloat16:
            pack(layer, remove_weight)
            return
        packed = ops.create_onednn_mm(weight.float().t(), PRODUCT_SHAPES)
        layer.cpu_linear = lambda x, _, bias: ops.onednn_mm(
            packed, x.float(), None if bias is None else bias.float()
        ).bfloat16()
        if remove_weight:
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    utils.dispatch_cpu_unquantized_gemm = pack_wide
