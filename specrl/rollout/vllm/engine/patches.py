"""What takes the place of parts of vLLM that are not about sampling; see `replacements`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch.distributed as dist

_names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The name of the memory that the ranks of a communicator share."""


def called(inspect: Callable[[], Any]) -> Any:
    """Call a function, in this process."""
    return inspect()


class OwnModules:
    """Stands for `sys` where vLLM looks through all modules."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        """vLLM's own modules, by name."""
        found = sys.modules.copy()  # in one go, because other threads import while this one looks
        return {name: module for name, module in found.items() if name.partition(".")[0] == "vllm"}


own_modules = OwnModules()


class FirstOfItsGroup:
    """Stands for the ranks of an engine where only the first of them would return something."""

    is_first_rank = True


def keeping_asynchronous(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a check of vLLM's configuration that leaves scheduling as it was asked for."""

    def check_and_keep(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = wanted

    return check_and_keep


def once(register: Callable[[], None]) -> Callable[[], None]:
    """Return a function that registers copies of kernels the first time that it is called."""
    done: list[bool] = []

    def register_once() -> None:
        if not done:
            done.append(True)
            register()

    return register_once


def make_group_name(communicator: Any) -> str:
    """Return a name for the memory that the ranks of a communicator share, which nobody else uses (collective)."""
    if communicator not in _names:
        name = [f"specrl-{uuid4().hex}"]
        dist.broadcast_object_list(name, src=communicator.ranks[0], group=communicator.cpu_group)
        _names[communicator] = name[0]
    return _names[communicator]


def unlinked(init_shared_memory: Callable[[Any], int]) -> Callable[[Any], int]:
    """Return a function that makes the shared memory, which then has no name and ends with its last rank."""

    def init_and_unlink(communicator: Any) -> int:
        handle = int(init_shared_memory(communicator))
        Path("/dev/shm", f"{communicator.group_name}_{communicator.communicator.rank}").unlink(missing_ok=True)
        return handle

    return init_and_unlink
