"""What is replaced in vLLM before an engine starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch.distributed as dist


def patch() -> None:
    """Replace everything that this file is about; a second call changes nothing."""
    from vllm.model_executor.models import registry

    fix_kernel_registration()
    _own_shared_memory()
    # vLLM would look at each new model's class in a process that imports everything again, so as not to initialise
    # CUDA in this one; here the engine does that next.
    registry._run_in_subprocess = lambda inspect: inspect()


def fix_kernel_registration() -> None:
    """Let engines start after llvmlite was imported, as Numba and so vLLM does, and more than one in a process.

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
