"""Megatron-core on machines without CUDA: import this module before anything from `megatron`.

Megatron-core places tensors on `torch.cuda.current_device()` and checks for `torch.cuda.FloatTensor`. Without a CUDA
device, each megatron module sees, once it is imported, a `torch` whose `cuda` and tensor factories mean the CPU; the
real `torch` keeps its own, so that other libraries in the process (vLLM, transformers) notice nothing. Only three
methods, which cannot be replaced per module, change everywhere: `Tensor.cuda`, `Module.cuda` (no-ops) and
`Tensor.type()`. With a CUDA device, importing this changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import torch

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")
LIKE = ("zeros_like", "empty_like", "ones_like")


class _Proxy(types.ModuleType):
    """A module that behaves like another one, except for the given names."""

    def __init__(self, real: types.ModuleType, **replacements: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(replacements)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Done:
    """An event or a stream on the CPU, where work is done when the call returns."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: _Done() if name == "record_event" else name == "query" or None


class _TypeName(str):
    """The name of a tensor type; a CPU type equals its CUDA counterpart, which megatron's optimizer asks for."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, str(other).replace("torch.cuda.", "torch."))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return wrapper


def _torch_for_megatron() -> _Proxy:
    cpu = torch.device("cpu")

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    cuda = _Proxy(
        torch.cuda,
        current_device=lambda: cpu,
        synchronize=nothing,
        empty_cache=nothing,
        set_device=nothing,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=set_rng_state,
        manual_seed=torch.manual_seed,
        current_stream=_Done,
        default_stream=_Done,
        Stream=_Done,
        Event=_Done,
        stream=lambda stream=None: contextlib.nullcontext(),
    )
    return _Proxy(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES + LIKE})


def _adapt(module: types.ModuleType, proxy: _Proxy) -> None:
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = proxy
    if module.__name__ == "megatron.core.jit":
        module.disable_jit_fuser()  # torch.compile of a dozen two-line functions costs minutes and gains nothing here
    if module.__name__ == "megatron.core.transformer.moe.moe_utils":
        # The sizes of what ranks exchange must be numbers: only tensors on GPUs are turned into those.
        module.__dict__["maybe_move_tensor_to_cpu"] = lambda tensor, as_numpy=False, **_: (
            tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
        )
    if module.__name__ == "megatron.core.tensor_parallel.random":
        module.__dict__["_set_cuda_rng_state"] = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
        module.__dict__["_get_cuda_rng_state"] = lambda device="cpu", clone=False, graph_safe=False: (
            torch.get_rng_state()
        )


class _Finder:
    """A meta-path finder that adapts each `megatron.*` module right after it has run."""

    def __init__(self, proxy: _Proxy) -> None:
        self.proxy = proxy

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("megatron."):
            return None
        sys.meta_path.remove(self)  # the other finders answer
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _adapt(module, self.proxy)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Make megatron-core importable and usable on the CPU; do nothing with CUDA, or when called again."""
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    assert "megatron.core" not in sys.modules, "specrl.training.megatron.cpu_shim must be imported first"
    # Megatron warns each time that Apex and Transformer Engine are missing, which is expected here.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.(reduce_scatter|all_gather_into)_tensor`")
    sys.meta_path.insert(0, _Finder(_torch_for_megatron()))
    tensor_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor_type(self, *args, **kwargs) if args or kwargs else _TypeName(tensor_type(self))

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    torch.Tensor.type = type_name  # type: ignore[assignment, method-assign]
    torch.Tensor.cuda = stay  # type: ignore[method-assign]
    torch.nn.Module.cuda = stay  # type: ignore[method-assign]


install()
