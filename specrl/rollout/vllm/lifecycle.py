"""Start, stop, sleep and wake-up of in-process engines, without what vLLM does to the whole process."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch

VLLM_VERSION = "0.32.0"
OFFLOAD = 1
"""vLLM's level that copies weights to the CPU. The other one drops them, and with them what no refit brings: buffers of
the drafter, scales, whatever a later vLLM keeps beside the weights."""
_live_engines: WeakSet[Any] = WeakSet()
"""Engines of this process that share vLLM's process groups."""


def require_version() -> None:
    """Raises RuntimeError when the installed vLLM is not the one this package was written against."""
    import vllm

    if vllm.__version__.split("+")[0] != VLLM_VERSION:
        raise RuntimeError(
            f"specrl replaces the sampler inside vLLM {VLLM_VERSION}, but vLLM {vllm.__version__} is installed; "
            "install the locked requirements, or port specrl/rollout/vllm and run tests/exactness"
        )


def start(arguments: dict[str, Any]) -> Any:
    """An in-process `LLMEngine`.

    vLLM disables `torch.set_num_threads` for the whole process, and destroys the default process group, which is the
    trainer's too, when an engine is garbage: both are taken back.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    _fix_kernel_registration()
    _count_ranks_without_compiling()
    set_num_threads = torch.set_num_threads
    try:
        llm_engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    finally:
        torch.set_num_threads = set_num_threads
    llm_engine.engine_core._finalizer.detach()
    _live_engines.add(llm_engine)
    return llm_engine


def stop(llm_engine: Any) -> None:
    """Free the engine, and with the last one vLLM's groups; the default process group stays."""
    from vllm.distributed import parallel_state

    core = llm_engine.engine_core.engine_core
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    _live_engines.discard(llm_engine)
    if not _live_engines:
        parallel_state.destroy_model_parallel()
    if not _live_engines and parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    gc.unfreeze()  # vLLM froze what it had allocated at its start
    gc.collect()


def _fix_kernel_registration() -> None:
    """Let engines start after llvmlite was imported (numba does, as vLLM itself), and more than one in a process.

    On CPUs vLLM looks for copies of its Triton kernels in every global of every module by `vars(value).get`, which
    fails at llvmlite's library handle: its `__dict__` is a foreign function. Once registered is enough.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    dispatcher.vars = lambda value: value.__dict__ if isinstance(value.__dict__, Mapping) else {}
    if dispatcher._registry:
        current_platform.register_triton_kernel_overrides = lambda: None


def _count_ranks_without_compiling() -> None:
    """Spare CPUs a compilation of seconds, when prompts are first scored, for ranks of tokens that nobody asks for."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import sampler

    if current_platform.is_cpu():
        count = sampler.batched_count_greater_than
        sampler.batched_count_greater_than = getattr(count, "_torchdynamo_orig_callable", count)


def model_runner(llm_engine: Any) -> Any:
    """The V1 model runner of an in-process engine."""
    runner = llm_engine.model_executor.driver_worker.worker.model_runner
    if not hasattr(runner, "_sample") or not hasattr(runner, "discard_request_mask"):
        raise RuntimeError(f"{type(runner).__module__} is not the V1 model runner; unset VLLM_USE_V2_MODEL_RUNNER")
    return runner


def output_tokens(llm_engine: Any, request_id: str) -> list[int]:
    """What an unfinished request has got so far, by the engine's own id."""
    return list(llm_engine.engine_core.engine_core.scheduler.requests[request_id].output_token_ids)


def sleep(llm_engine: Any) -> None:
    """Give the engine's GPU memory back; only `wake` may follow.

    Raises:
        ValueError: vLLM cannot sleep here, which is everywhere but on GPUs and with `engine.sleep = true`.
    """
    if not llm_engine.model_config.enable_sleep_mode:
        raise ValueError("the engine cannot sleep: it was started on a CPU or without engine.sleep = true")
    assert not llm_engine.has_unfinished_requests(), "sleep while generating"
    llm_engine.sleep(OFFLOAD)


def wake(llm_engine: Any) -> None:
    """The weights are back, for a refit to replace, and the KV cache is empty. An engine that is awake stays so."""
    if llm_engine.model_config.enable_sleep_mode and llm_engine.is_sleeping():
        torch.cuda.empty_cache()  # what the trainer has freed, but torch keeps
        llm_engine.wake_up()
