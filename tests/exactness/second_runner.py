"""One engine on vLLM's second model runner, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from specrl.rollout.requests import Request


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    log_kept_mass: list[float]
    scores: list[float]
    """Of the same tokens, by a second pass over prompt and response at temperature 1."""


class Result(NamedTuple):
    answers: list[Answer]
    num_drafts: int
    num_accepted: int
    num_preempted: int


class KernelCalls(NamedTuple):
    """What an iteration asks of the device."""

    launched: list[str]
    """The names of our kernels, in order."""
    waits: list[str]
    """The operations that wait for the device or copy from it."""


def calls_of_an_iteration() -> KernelCalls:
    """Verify a batch with drafts as on a GPU, on tensors without values: what needs a value would raise an error."""
    import os

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from specrl.rollout.vllm import replacements
    from specrl.rollout.vllm.engine.arguments import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    replacements.prepare()
    replacements.install()
    from specrl.rollout.sampling import kernels
    from specrl.rollout.sampling.devices import Sampling
    from specrl.rollout.vllm import device_sampler

    launched: list[str] = []
    waits: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: launched.append(self.name)

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (
                "_local_scalar_dense" in str(func)
                or "nonzero" in str(func)
                or ("_to_copy" in str(func) and ((kwargs or {}).get("device") is not None))
            ):
                waits.append(str(func))
            return func(*args, **(kwargs or {}))

    for name in ("sum_blocks", "keep_most_probable", "choose_token", "accept"):
        setattr(kernels, name, Noted(name))
    # vLLM's own two kernels on the path; their launches are vLLM's.
    device_sampler.gather_draft_sampled = lambda ids, positions, rows, *_: (ids[rows], positions[rows])
    device_sampler.get_num_sampled_and_rejected = lambda counts, *_: (counts, counts)
    with FakeTensorMode(), Waits():
        state = SimpleNamespace(gpu=torch.zeros(8, dtype=torch.int32))
        names = ("temperature", "top_k", "top_p", "seeds")
        sampler = object.__new__(device_sampler.InvariantSampler)
        sampler.sampling = Sampling(kernels.pick, kernels.verify)
        sampler.sampling_states = SimpleNamespace(**dict.fromkeys(names, state))
        sampler.req_states = SimpleNamespace(prefill_len=state, total_len=state)
        sampler.stop_tokens = SimpleNamespace(gpu=torch.zeros(8, device_sampler.MOST_STOP_TOKENS, dtype=torch.int64))
        sampler.longest = state
        verifier = object.__new__(device_sampler.InvariantVerifier)
        verifier.sampler, verifier.num_speculative_steps = sampler, 3
        batch = SimpleNamespace(
            num_reqs=4,
            input_ids=torch.zeros(16, dtype=torch.int32),
            positions=torch.zeros(16, dtype=torch.int64),
            logits_indices=torch.zeros(16, dtype=torch.int64),
            expanded_idx_mapping=torch.zeros(16, dtype=torch.int64),
            expanded_local_pos=torch.zeros(16, dtype=torch.int32),
            idx_mapping=torch.zeros(4, dtype=torch.int64),
            cu_num_logits=torch.zeros(5, dtype=torch.int32),
            cu_num_logits_np=np.arange(0, 17, 4),
            seq_lens=torch.zeros(4, dtype=torch.int32),
        )
        verifier(torch.zeros(16, 5000), batch)
    return KernelCalls(launched, waits)


def generate(
    policy: Path, requests: list[Request], stop_token: int, speculative: dict[str, Any] | None, options: dict[str, Any]
) -> Result:
    """Start an engine, answer all requests and score the first answers."""
    import os

    from specrl.rollout.vllm import replacements
    from specrl.rollout.vllm.engine.arguments import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    replacements.prepare()
    replacements.install()
    from vllm import LLM, SamplingParams

    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 192, "max_num_seqs": 32}
    arguments |= {"kv_cache_memory_bytes": 128 << 20, "async_scheduling": True, "block_size": 32} | options
    llm = LLM(
        model=str(policy),
        skip_tokenizer_init=True,
        speculative_config=speculative,
        disable_log_stats=False,
        **arguments,
    )
    parameters = [
        SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=[stop_token],
            logprobs=1,
            detokenize=False,
        )
        for request in requests
    ]
    prompts = [{"prompt_token_ids": request.prompt_tokens} for request in requests]
    outputs = [output.outputs[0] for output in llm.generate(prompts, parameters, use_tqdm=False)]
    sequences = [
        {"prompt_token_ids": request.prompt_tokens + list(output.token_ids)}
        for request, output in zip(requests[:8], outputs, strict=False)
    ]
    scored = llm.generate(sequences, SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
    answers = []
    for index, output in enumerate(outputs):
        tokens = list(output.token_ids)
        given = [at[token].logprob for at, token in zip(output.logprobs, tokens, strict=True)]
        masses = [at[-1].logprob for at in output.logprobs]
        scores: list[float] = []
        if index < len(scored):
            after = scored[index].prompt_logprobs[-len(tokens) :]
            scores = [at[token].logprob for at, token in zip(after, tokens, strict=True)]
        answers.append(Answer(tokens, given, masses, scores))
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return Result(
        answers,
        int(metrics.get("vllm:spec_decode_num_drafts", 0)),
        int(metrics.get("vllm:spec_decode_num_accepted_tokens", 0)),
        int(metrics.get("vllm:num_preemptions", 0)),
    )
