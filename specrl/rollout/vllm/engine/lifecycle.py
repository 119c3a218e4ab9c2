"""In-process vLLM engines: their use, and start and stop without side effects on the whole process.

`VllmEngine` contains every plain call to vLLM; nothing outside this package names an attribute of vLLM.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from specrl.models.directory import HEAD
from specrl.precision.native import FIRST_OF_POWERS
from specrl.processes import importing
from specrl.rollout.drafts.device_drafts import FACTS
from specrl.rollout.drafts.text_index import number_of
from specrl.rollout.errors import RefitError
from specrl.rollout.vllm import replacements
from specrl.rollout.vllm.engine.arguments import BATCH_INVARIANT, ENVIRONMENT, FIRST_INVARIANT_CAPABILITY, OF_THE_USER
from specrl.rollout.vllm.engine.running import RunningRequest
from specrl.rollout.vllm.weights.load import NOT_LOADED, Weights, check_draft_vocabulary, check_own_head, reload_weights

VLLM_VERSION = "0.32.0"
OFFLOAD = 1
"""The level of vLLM's sleep that copies weights to the CPU. The other level saves the models' buffers alone: no refit
brings back what else was made while loading, such as the samplers' tensors and a draft model's weights."""
_live_engines: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The engines of this process, which share vLLM's process groups, with the scratch memory of their experts: CUDA graphs
write to it, and vLLM itself holds that of the latest engine alone."""


class Iteration(NamedTuple):
    """The outcome of an iteration."""

    batch: int
    """The number of requests that received tokens."""
    all_decoding: bool
    """Whether none of these tokens were first ones, and no other request was reading its prompt."""
    mean_tokens: float | None
    """The mean tokens of the requests that it did not finish, which nothing cut off; None if it finished all."""


class VllmEngine:
    """An in-process vLLM engine, and its model runner for the modules that replace parts of it.

    Requests go to vLLM's engine core and outputs come from it, without the objects that a server creates for them.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Start the engine with these arguments of vLLM's `EngineArgs`; collective over its ranks."""
        self.llm = start(arguments)
        self.runner = self.llm.model_executor.driver_worker.worker.model_runner
        assert hasattr(self.runner, "req_states"), "not vLLM's V2 model runner: unset VLLM_USE_V2_MODEL_RUNNER"
        self.sampler = self.runner.sampler
        """The sampler inside the engine, an `InvariantSampler`."""
        self.runner.prompt_logprobs_worker.sampler = self.sampler
        self.policy: nn.Module = self.runner.model
        """The policy's module."""
        self.drafter: nn.Module | None = self.runner.get_draft_model()
        """The drafter's module without vLLM's wrappers around it; None if no model drafts."""
        self.vocab_size = int(self.llm.model_config.get_vocab_size())
        """The number of tokens in the policy's vocabulary."""
        self.is_first = int(self._group.rank_in_group) == 0
        """Whether this is the first rank of its engine, whose decisions bind the others."""
        self.last: Iteration | None = None
        """The outcome of the last call of `step`; None if there was none."""
        self.decode_steps = 0
        """The iterations so far in which at least one request was decoding."""
        self._running: dict[str, RunningRequest] = {}
        self._num_requests = 0

    @property
    def num_running(self) -> int:
        """The number of unfinished requests."""
        return len(self._running)

    @property
    def graph_sizes(self) -> list[int]:
        """The numbers of tokens for which CUDA graphs were captured; none on CPUs."""
        return list(self.llm.vllm_config.compilation_config.cudagraph_capture_sizes or ())

    @property
    def text_speculator(self) -> Any:
        """The `TextSpeculator` of an engine that drafts."""
        return self.runner.speculator.text

    @property
    def _core(self) -> Any:
        return self.llm.engine_core.engine_core

    @property
    def _group(self) -> Any:
        from vllm.distributed import parallel_state

        return parallel_state.get_tp_group()

    def agreed(self, *values: float) -> list[float]:
        """The first rank's values, on all ranks of the engine, which must act alike (collective)."""
        group = self._group
        if group.world_size == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64)
        torch.distributed.broadcast(shared, src=group.ranks[0], group=group.cpu_group)
        found: list[float] = shared.tolist()
        return found

    def of_first(self, value: Any) -> Any:
        """The first rank's value, whatever it is, on all ranks of the engine (collective)."""
        group, shared = self._group, [value]
        if group.world_size > 1:
            torch.distributed.broadcast_object_list(shared, src=group.ranks[0], group=group.cpu_group)
        return shared[0]

    def true_on_any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank of the engine (collective)."""
        shared = torch.tensor([int(flag)])
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=self._group.cpu_group)
        return bool(shared)

    def add(self, prompt_tokens: list[int], params: Any, begun: RunningRequest | None = None) -> RunningRequest:
        """Queue a request with vLLM's `SamplingParams`, or the rest of one that has begun."""
        request = begun or RunningRequest(len(prompt_tokens))
        request.name = str(self._num_requests)
        request.forget_routes()  # vLLM returns them from the first token on
        self._num_requests += 1
        tokens = prompt_tokens + request.tokens
        facts = number_of(prompt_tokens), self._num_requests, len(tokens) + params.max_tokens, len(prompt_tokens)
        params.extra_args = {FACTS: facts}
        prompt = {"prompt_token_ids": tokens}
        asked = self.llm.input_processor.process_inputs(request.name, prompt, params, self.llm.get_supported_tasks())
        self.llm.engine_core.add_request(asked)
        self._running[request.name] = request
        return request

    def step(self) -> list[RunningRequest]:
        """Run one iteration and return the requests that it finished.

        With asynchronous scheduling it starts an iteration, and returns the outcome of the one before.

        Raises:
            NonFiniteLogitsError: A token was picked from logits that are not finite.
        """
        outputs = self.llm.engine_core.get_output().outputs
        requests = [self._running[output.request_id] for output in outputs]
        decoding = sum(request.decodes for request in requests)
        for request, output in zip(requests, outputs, strict=True):
            request.take(output)
        self.decode_steps += decoding > 0
        finished = [request for request in requests if request.finish_reason is not None]
        pairs = zip(requests, outputs, strict=True)
        counts = [len(output.new_token_ids) for request, output in pairs if request.finish_reason is None]
        mean = fmean(counts) if counts else None
        all_decoding = decoding == len(outputs) >= len(self._core.scheduler.running)
        self.last = Iteration(len(outputs), all_decoding, mean) if outputs else None
        # Requests ended by a stop string still run in vLLM, which has already dropped the others.
        self.llm.engine_core.abort_requests([request.name for request in finished])
        for request in finished:
            del self._running[request.name]
        return finished

    def end(self) -> None:
        """Abort all running requests, and wait until no iteration is in flight."""
        self.llm.engine_core.abort_requests(list(self._running))
        self._running.clear()
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self.llm.engine_core.get_output()

    def draft_up_to(self, lengths: Sequence[int]) -> None:
        """Set the draft lengths by the number of running requests; the entry for 0 requests is not used."""
        lookup = self._core.scheduler.dynamic_sd_lookup
        assert len(lengths) == len(lookup)
        lookup[:] = lengths

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        if not self.llm.reset_prefix_cache():
            raise RefitError("the engine's prefix cache cannot be dropped: something still holds blocks of it")

    def load_policy(self, weights: Weights, names: frozenset[str]) -> None:
        """Load the policy in place; raises what `reload_weights` raises.

        Args:
            names: The names of the policy's tensors on disk; an explicit head is always known.
        """
        assert not self._running, "refit while generating"
        tied = bool(self.llm.model_config.hf_config.tie_word_embeddings)
        required = names - {HEAD} if tied else names | {HEAD}
        reload_weights(self.llm.vllm_config, self.policy, weights, required, names | {HEAD}, tied=tied)

    def load_drafter(self, weights: Weights, names: frozenset[str]) -> None:
        """Load the drafter in place, given its tensors' names on disk; its embeddings are the policy's."""
        if self.drafter is None:
            raise RefitError("refit was sent a drafter, but the engine has none")
        check_own_head(self.drafter, self.policy, names)
        reload_weights(self.llm.vllm_config, self.drafter, weights, names - NOT_LOADED, names | NOT_LOADED)
        check_draft_vocabulary(self.drafter, self.vocab_size)

    def sleep(self) -> None:
        """Free the engine's GPU memory; the next call must be `wake`."""
        if not self.llm.model_config.enable_sleep_mode:
            raise ValueError("the engine cannot sleep: it was started on a CPU or without engine.sleep = true")
        assert not self._running, "sleep while generating"
        self.llm.sleep(OFFLOAD)

    def wake(self) -> None:
        """Allocate the memory again, with weights for a refit to replace, and an empty KV cache.

        This does nothing on an engine that is awake or cannot sleep.
        """
        if self.llm.is_sleeping():
            torch.cuda.empty_cache()  # frees memory that the trainer has freed but torch caches
            self.llm.wake_up()
            # The cache may hold the trainer's old data, including NaN, which a kernel may multiply by the 0 of a place
            # after a sequence. vLLM zeroes it at the start and, after a sleep, only on AMD's GPUs.
            for cache in self.runner.kv_caches:
                cache.zero_()

    def shutdown(self) -> None:
        """Free the engine; the default process group stays."""
        stop(self.llm)


def set_environment(*, batch_invariant: bool = False) -> None:
    """Set the variables of `ENVIRONMENT`, before vLLM is imported.

    Args:
        batch_invariant: `engine.batch_invariant`.

    Raises:
        ValueError: vLLM has no batch-invariant kernels for this device, or was imported without them.
    """
    if batch_invariant:
        _check_batch_invariant()
        os.environ[BATCH_INVARIANT] = "1"
    own = {name: os.environ[name] for name in OF_THE_USER if name in os.environ}
    os.environ.update({**ENVIRONMENT, **own})
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= FIRST_OF_POWERS:
        # There DeepGEMM multiplies only by scales that are powers of two, and other scales, which `ENVIRONMENT` asks
        # for, crash the engine; CUTLASS's kernels accept them.
        os.environ["VLLM_USE_DEEP_GEMM"] = "0"


def _check_batch_invariant() -> None:
    key = "engine.batch_invariant = true"
    if not torch.cuda.is_available():
        raise ValueError(f"{key}: vLLM has batch-invariant kernels for GPUs alone; set it to false")
    if (capability := torch.cuda.get_device_capability()) < FIRST_INVARIANT_CAPABILITY:
        raise ValueError(
            f"{key} needs a GPU of compute capability 9.0 (Hopper) or later, this one has "
            f"{capability[0]}.{capability[1]}: vLLM's kernels for it would leave the trainer without gradients"
        )
    if os.environ.get(BATCH_INVARIANT) != "1" and "vllm" in sys.modules:
        raise ValueError(f"{key}: vLLM has been imported without it; start such an engine in a process of its own")


def require_version() -> None:
    """Raise RuntimeError if the installed vLLM is not the one that this package was written against."""
    with importing():
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
    with importing():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        replacements.install()
        from vllm.v1.worker import workspace
    set_num_threads = torch.set_num_threads
    try:
        llm_engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    finally:
        torch.set_num_threads = set_num_threads
    llm_engine.engine_core._finalizer.detach()
    _live_engines[llm_engine] = workspace._manager
    return llm_engine


def stop(llm_engine: Any) -> None:
    """Free the engine and, with the last one, vLLM's process groups; the default process group stays."""
    from vllm.distributed import parallel_state
    from vllm.v1.worker import workspace

    core = llm_engine.engine_core.engine_core
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    _live_engines.pop(llm_engine, None)
    workspace._manager = next(iter(_live_engines.values()), None)  # vLLM dropped it with the engine
    if not _live_engines:
        parallel_state.destroy_model_parallel()
    if not _live_engines and parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    gc.unfreeze()  # vLLM froze what it had allocated at its start
    gc.collect()
