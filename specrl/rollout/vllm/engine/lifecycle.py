"""In-process vLLM engines: how they are used, and started and stopped without side effects on the whole process.

`VllmEngine` holds every plain call that the rollout engine makes; nothing outside of this package names an attribute of
vLLM.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from numpy.typing import NDArray
from torch import nn

from specrl.rollout.errors import RefitError
from specrl.rollout.vllm.engine.arguments import ENVIRONMENT
from specrl.rollout.vllm.engine.parallel_drafting import ParallelDrafting
from specrl.rollout.vllm.engine.patches import patch
from specrl.rollout.vllm.experts.routes import captured_from_the_start, routes_of
from specrl.rollout.vllm.weights.load import Weights, check_own_head, refit_drafter, refit_policy

VLLM_VERSION = "0.32.0"
OFFLOAD = 1
"""The level of vLLM's sleep that copies weights to the CPU. The other level drops them together with what no refit
brings: buffers of the drafter, scales, and whatever a later vLLM keeps beside the weights."""
_live_engines: WeakSet[Any] = WeakSet()
"""The engines of this process, which share vLLM's process groups."""


@dataclass(frozen=True)
class FinishedRequest:
    """What vLLM returns for a request that is done."""

    name: str
    """The name that `VllmEngine.add` gave it."""
    tokens: list[int]
    finish_reason: str
    prompt_logprobs: list[float]
    """The log-probs of all prompt tokens but the first, in nats; empty unless they were asked for."""

    @classmethod
    def of(cls, output: Any) -> FinishedRequest:
        """Return what matters of vLLM's `RequestOutput`."""
        completion = output.outputs[0]
        logprobs = []
        if output.prompt_logprobs is not None:
            pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            logprobs = [float(entry[token].logprob) for entry, token in pairs]
        return cls(output.request_id, list(completion.token_ids), completion.finish_reason, logprobs)


class VllmEngine:
    """An in-process vLLM engine, and its V1 model runner, for the modules that replace parts of it."""

    def __init__(self, arguments: dict[str, Any], *, keeps_routes: bool = False) -> None:
        """Start the engine; collective over its ranks.

        Args:
            arguments: Arguments of vLLM's `EngineArgs`.
            keeps_routes: Whether to keep the experts that each token is sent to, for `routes`.
        """
        with captured_from_the_start() if keeps_routes else nullcontext():
            self.llm = start(arguments)
        self.runner = model_runner(self.llm)
        self._parallel = ParallelDrafting.install(self.runner)
        self._num_requests = 0

    @property
    def policy(self) -> nn.Module:
        """The policy's module."""
        model: nn.Module = self.runner.model
        return model

    @property
    def drafter(self) -> nn.Module | None:
        """The drafter's module without vLLM's wrappers around it; None if no model drafts."""
        return draft_model(self.runner)

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the policy's vocabulary."""
        return int(self.llm.model_config.get_vocab_size())

    def add(self, prompt_tokens: list[int], params: Any) -> tuple[str, str]:
        """Queue a request with vLLM's `SamplingParams`; return its name, as in `step`, and the engine's own id."""
        name = str(self._num_requests)
        self._num_requests += 1
        internal = self.llm.add_request(name, {"prompt_token_ids": prompt_tokens}, params)
        return name, internal

    def step(self) -> list[FinishedRequest]:
        """Run one iteration and return the requests that it finished."""
        return [FinishedRequest.of(output) for output in self.llm.step() if output.finished]

    def tokens_so_far(self, internal: str) -> list[int]:
        """Return the response tokens of an unfinished request, by the engine's own id."""
        return list(self.llm.engine_core.engine_core.scheduler.requests[internal].output_token_ids)

    def routes(self, internal: str, num_tokens: int) -> NDArray[Any] | None:
        """Return the experts of a request's first tokens, as `Routes.of` does; None where they are not kept."""
        routes = routes_of(self.runner)
        return routes.of(internal, num_tokens) if routes is not None else None

    def abort(self, internal: Iterable[str]) -> None:
        """Give up unfinished requests, by the engine's own ids."""
        if names := list(internal):
            self.llm.abort_request(names, internal=True)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes.

        Raises:
            RefitError: A block is still in use, and could be read later with the keys of another policy.
        """
        if not self.llm.reset_prefix_cache():
            raise RefitError("the engine's prefix cache cannot be dropped: something still holds blocks of it")

    def refit_policy(self, weights: Weights, names: frozenset[str]) -> None:
        """Load the policy in place; errors are those of `weights.load.refit_policy`."""
        assert not self.llm.has_unfinished_requests(), "refit while generating"
        tied = bool(self.llm.model_config.hf_config.tie_word_embeddings)
        refit_policy(self.llm.vllm_config, self.policy, weights, names, tied)

    def refit_drafter(self, weights: Weights, names: frozenset[str]) -> None:
        """Load the drafter in place.

        Raises:
            RefitError: There is no drafter, a tensor is missing or unknown, or the drafter's head is the policy's.
        """
        if self.drafter is None:
            raise RefitError("refit was sent a drafter, but the engine has none")
        check_own_head(self.drafter, self.policy, names)
        if self._parallel is None:
            refit_drafter(self.llm.vllm_config, self.drafter, weights, names)
        else:
            refit_drafter(self.llm.vllm_config, self.drafter, self._parallel.noted(weights), names)
            self._parallel.refresh()

    @property
    def can_sleep(self) -> bool:
        """Whether the engine was started on a GPU with sleep mode."""
        return bool(self.llm.model_config.enable_sleep_mode)

    def sleep(self) -> None:
        """Give the engine's GPU memory back; the next call must be `wake`.

        Raises:
            ValueError: The engine was started on a CPU or without `engine.sleep = true`.
        """
        if not self.can_sleep:
            raise ValueError("the engine cannot sleep: it was started on a CPU or without engine.sleep = true")
        assert not self.llm.has_unfinished_requests(), "sleep while generating"
        self.llm.sleep(OFFLOAD)

    def wake(self) -> None:
        """Take the memory again, with the weights, for a refit to replace, and an empty KV cache.

        On an engine that is awake or cannot sleep this does nothing.
        """
        if self.can_sleep and self.llm.is_sleeping():
            torch.cuda.empty_cache()  # frees what the trainer has freed but torch keeps
            self.llm.wake_up()

    def stop(self) -> None:
        """Free the engine; the default process group stays."""
        stop(self.llm)


def set_environment() -> None:
    """Set the variables of `ENVIRONMENT` that the user has not set, before vLLM is imported."""
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    importlib.import_module("numba.core.config").reload_config()  # Numba may have been imported before


def require_version() -> None:
    """Raise RuntimeError if the installed vLLM is not the one that this package was written against."""
    import vllm

    if vllm.__version__.split("+")[0] != VLLM_VERSION:
        raise RuntimeError(
            f"specrl replaces the sampler inside vLLM {VLLM_VERSION}, but vLLM {vllm.__version__} is installed; "
            "install the locked requirements, or port specrl/rollout/vllm and run tests/exactness"
        )


def start(arguments: dict[str, Any]) -> Any:
    """Start and return an in-process `LLMEngine`.

    vLLM disables `torch.set_num_threads` for the whole process, and when an engine is garbage-collected it destroys the
    default process group, which is the trainer's too. Both are prevented here.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    patch()
    set_num_threads = torch.set_num_threads
    try:
        llm_engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    finally:
        torch.set_num_threads = set_num_threads
    llm_engine.engine_core._finalizer.detach()
    _live_engines.add(llm_engine)
    return llm_engine


def stop(llm_engine: Any) -> None:
    """Free the engine, and with the last one vLLM's process groups too; the default process group stays."""
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


def model_runner(llm_engine: Any) -> Any:
    """Return the V1 model runner of an in-process engine.

    Raises:
        RuntimeError: The engine has another runner.
    """
    runner = llm_engine.model_executor.driver_worker.worker.model_runner
    if not hasattr(runner, "_sample") or not hasattr(runner, "discard_request_mask"):
        raise RuntimeError(f"{type(runner).__module__} is not the V1 model runner; unset VLLM_USE_V2_MODEL_RUNNER")
    return runner


def draft_model(runner: Any) -> nn.Module | None:
    """Return the drafter's module inside the engine, without vLLM's wrappers around it; None if no model drafts."""
    model: nn.Module | None = runner.get_draft_model()
    return model
