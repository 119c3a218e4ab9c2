"""The only file that reaches into vLLM: its sampler replaced, k changed while running, weights reloaded in place.

Written against vLLM 0.32.0 and its V1 model runner. On another version `require_version` says so, because everything
here names attributes that vLLM does not promise to keep.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from specrl.rollout.acceptance import SpeculationStats, accepted_prefix
from specrl.rollout.sampling import pick, uniforms

VLLM_VERSION = "0.32.0"
SEED = "specrl_seed"
_live_engines: WeakSet[Any] = WeakSet()
"""Engines of this process that share vLLM's process groups."""


def require_version() -> None:
    """Raises RuntimeError when the installed vLLM is not the one this file was written against."""
    import vllm

    if vllm.__version__.split("+")[0] != VLLM_VERSION:
        raise RuntimeError(
            f"specrl replaces the sampler inside vLLM {VLLM_VERSION}, but vLLM {vllm.__version__} is installed; "
            "install the locked requirements, or port specrl/rollout/vllm_patch.py and run tests/exactness"
        )


def start(arguments: dict[str, Any]) -> Any:
    """An in-process `LLMEngine`.

    vLLM disables `torch.set_num_threads` for the whole process, and destroys the default process group, which is the
    trainer's too, when an engine is garbage: both are taken back.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    _mend_kernel_registration()
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


def _mend_kernel_registration() -> None:
    """Let engines start after llvmlite was imported (numba does, as vLLM itself), and more than one in a process.

    On CPUs vLLM looks for copies of its Triton kernels in every global of every module by `vars(value).get`, which
    fails at llvmlite's library handle: its `__dict__` is a foreign function. Once registered is enough.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    dispatcher.vars = lambda value: value.__dict__ if isinstance(value.__dict__, Mapping) else {}
    if dispatcher._registry:
        current_platform.register_triton_kernel_overrides = lambda: None


def model_runner(llm_engine: Any) -> Any:
    """The V1 model runner of an in-process engine."""
    runner = llm_engine.model_executor.driver_worker.worker.model_runner
    if not hasattr(runner, "_sample") or not hasattr(runner, "discard_request_mask"):
        raise RuntimeError(f"{type(runner).__module__} is not the V1 model runner; unset VLLM_USE_V2_MODEL_RUNNER")
    return runner


def set_draft_length(llm_engine: Any, k: int) -> None:
    """Draft `k` tokens for every batch size from the next iteration; the engine must have been made with a schedule."""
    lookup = llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup
    lookup[:] = [k] * len(lookup)


def draft_model(runner: Any) -> nn.Module | None:
    """The drafter's module inside the engine, none for drafters without weights."""
    model = getattr(getattr(runner, "drafter", None), "model", None)
    return model if isinstance(model, nn.Module) else None


def refuse_shared_head(runner: Any) -> None:
    """Raises ValueError where vLLM made the drafter share the policy's head: refitting one would overwrite the other.

    It does when the two are equal at load time, which needs a draft vocabulary as large as the policy's.
    """
    drafter = draft_model(runner)
    if drafter is not None and drafter.lm_head is runner.model.lm_head:
        raise ValueError("the drafter's head is the policy's; give it a draft vocabulary smaller than the policy's")


def reload_weights(vllm_config: Any, model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights with on-disk names in place. On CPUs linear weights are packed after loading: each is packed anew.

    A head tied to the embeddings keeps its own packed copy, which a reload leaves as it was: it is packed again too.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import inplace

    with torch.inference_mode(), set_current_vllm_config(vllm_config):
        inplace.reload_weights(
            vllm_config, model, weights_iterator=weights, weights_path=None, is_checkpoint_format=True
        )
        head, embeddings = getattr(model, "lm_head", None), getattr(model.model, "embed_tokens", None)
        if head is not None and embeddings is not None and head.weight is embeddings.weight:
            head.quant_method.process_weights_after_loading(head)


def linear_output(layer: nn.Module, inputs: Tensor) -> Tensor:
    """What a linear layer or head of the engine computes with its packed weight, no bias: [n, in] -> [n, out]."""
    method: Any = layer.quant_method
    with torch.inference_mode():
        output: Tensor = method.apply(layer, inputs, None)
    return output


def seed_argument(seed: int) -> dict[str, Any]:
    """Keyword of `SamplingParams` that carries a request's seed to the sampler.

    Not vLLM's own `seed`: that makes a torch generator per request, which nobody draws from, and which on CPUs cannot
    be rewound, so that a prompt prefilled in chunks would end in an error.
    """
    return {"extra_args": {SEED: seed}}


def request_seed(params: Any) -> int:
    """The seed that `seed_argument` put into a request; ValueError for a request without one."""
    if SEED not in (params.extra_args or {}):
        raise ValueError("a request reached the sampler without a seed; every request must be given one")
    return int(params.extra_args[SEED])


@dataclass
class RequestRecord:
    """What the sampler keeps of one running request."""

    prompt_length: int
    uniforms: np.ndarray[Any, np.dtype[np.float64]]
    """u(seed, position) from position `prompt_length` on."""
    temperature: float
    top_k: int
    top_p: float
    started_at: float
    logprobs: list[float] = field(default_factory=list)
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class InvariantSampler:
    """Takes the place of the runner's `_sample`: picks every token, drafted or not; a draft is accepted when picked.

    Keeps, per request, the log-probs of what it picked and what became of its drafts. `records` is keyed by the
    engine's request id; whoever finishes a request takes its record out.
    """

    def __init__(self, runner: Any, k: int) -> None:
        self.runner = runner
        self.k = k
        self.records: dict[str, RequestRecord] = {}
        self.stats = SpeculationStats()

    def install(self) -> None:
        self.runner._sample = self

    def __call__(self, logits: Tensor, metadata: Any) -> Any:
        """Signature and result of `GPUModelRunner._sample`: logits [sum of (drafts + 1) over requests, vocab]."""
        from vllm.v1.outputs import SamplerOutput

        batch = self.runner.input_batch
        ids: list[str] = batch.req_ids
        counts = [0] * len(ids) if metadata is None else metadata.num_draft_tokens
        assert logits.shape[0] == sum(counts) + len(ids), (logits.shape, counts)
        self._admit(ids)
        states = [self.runner.requests[request_id] for request_id in ids]
        # Output lengths before this iteration: a picked token's index in its response.
        starts = [state.num_tokens - state.num_prompt_tokens for state in states]
        tokens, logprobs = self._pick(logits, [self.records[request_id] for request_id in ids], starts, counts)
        drafts = [] if metadata is None else metadata.draft_token_ids.tolist()
        rows = self._verify(ids, starts, counts, tokens, logprobs, drafts)
        width = max(counts) + 1
        padded = [row + [-1] * (width - len(row)) for row in rows]
        sampled = torch.tensor(padded, dtype=torch.int32, device=logits.device)
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=None)

    def _admit(self, ids: list[str]) -> None:
        """Make records of requests seen for the first time; their uniforms are computed once, for all positions."""
        new = [request_id for request_id in ids if request_id not in self.records]
        if not new:
            return
        states = [self.runner.requests[request_id] for request_id in new]
        longest = max(state.sampling_params.max_tokens for state in states) + self.k + 1
        seeds = torch.tensor([[request_seed(state.sampling_params)] for state in states])
        positions = torch.tensor([[state.num_prompt_tokens] for state in states]) + torch.arange(longest)
        table = uniforms(seeds, positions).numpy()
        for request_id, state, row in zip(new, states, table, strict=True):
            params = state.sampling_params
            self.records[request_id] = RequestRecord(
                state.num_prompt_tokens, row, params.temperature, max(params.top_k, 0), params.top_p, time.time()
            )

    def _pick(
        self, logits: Tensor, records: list[RequestRecord], starts: list[int], counts: list[int]
    ) -> tuple[list[int], list[float]]:
        repeats = np.array(counts) + 1
        u = np.concatenate([r.uniforms[s : s + n + 1] for r, s, n in zip(records, starts, counts, strict=True)])
        settings = (
            np.array([record.temperature for record in records], dtype=np.float32),
            np.array([record.top_k for record in records], dtype=np.int64),
            np.array([record.top_p for record in records], dtype=np.float32),
        )
        temperature, top_k, top_p = (torch.from_numpy(setting.repeat(repeats)) for setting in settings)
        tokens, logprobs = pick(logits, temperature, top_k, top_p, torch.from_numpy(u).to(logits.device))
        return tokens.tolist(), logprobs.tolist()

    def _verify(
        self,
        ids: list[str],
        starts: list[int],
        counts: list[int],
        tokens: list[int],
        logprobs: list[float],
        drafts: list[int],
    ) -> list[list[int]]:
        """Tokens each request gets: its accepted drafts and one more. Writes log-probs and counters.

        Rows of a prompt's earlier chunks, and of outputs recomputed after a preemption, are thrown away by the runner.
        """
        discarded = self.runner.discard_request_mask.np
        rows: list[list[int]] = []
        per_pos = [0] * max(counts)
        num_drafts = num_draft_tokens = 0
        decoding = False
        first = first_draft = 0
        for index, (request_id, start, count) in enumerate(zip(ids, starts, counts, strict=True)):
            accepted = accepted_prefix(drafts[first_draft : first_draft + count], tokens[first : first + count])
            kept = slice(first, first + accepted + 1)
            rows.append(tokens[kept])
            first, first_draft = first + count + 1, first_draft + count
            if discarded[index]:
                continue
            record = self.records[request_id]
            record.logprobs[start:] = logprobs[kept]
            decoding = decoding or start > 0
            if count:
                record.num_drafts += 1
                record.num_draft_tokens += count
                record.num_accepted_tokens += accepted
                num_drafts += 1
                num_draft_tokens += count
                for position in range(accepted):
                    per_pos[position] += 1
        self.stats += SpeculationStats(num_drafts, num_draft_tokens, sum(per_pos), tuple(per_pos), int(decoding))
        return rows
