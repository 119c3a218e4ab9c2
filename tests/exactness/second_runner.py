"""One engine on vLLM's second model runner, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

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

    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 32}
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
