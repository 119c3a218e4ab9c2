"""Engines with drafts from text on vLLM's second model runner, in a process of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specrl.rollout.drafts.device_drafts import Counts
from specrl.rollout.requests import Request


@dataclass(frozen=True)
class Stored:
    """What there is to draft from in one generation."""

    texts: Mapping[tuple[int, ...], Sequence[Sequence[int]]] = field(default_factory=dict)
    seeds: Mapping[tuple[int, ...], Sequence[int]] | None = None
    recent: Sequence[Sequence[int]] = ()


class Answers(NamedTuple):
    tokens: list[list[int]]
    counts: Counts
    num_preempted: int


def generate(
    policy: Path,
    requests: list[Request],
    stop_token: int,
    speculative: dict[str, Any],
    drafter_k: int,
    generations: Sequence[Stored],
    expected: Mapping[int, float],
    options: dict[str, Any],
) -> list[Answers]:
    """Answer all requests once for each of `generations`.

    Args:
        expected: The accepted tokens that drafts of a kind are said to bring; of any other kind 1.
    """
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
        additional_config={"drafter_k": drafter_k},
        **arguments,
    )
    core = llm.llm_engine.engine_core.engine_core
    assert (type(core.scheduler).__name__ == "AsyncScheduler") == (core.batch_queue is not None)
    assert (core.batch_queue is not None) == arguments["async_scheduling"]
    runner = core.model_executor.driver_worker.worker.model_runner
    text = runner.speculator.text
    text.keep_recent(100_000)
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
    table = np.ones((text.drafts.k + 1, 10))
    for kind, value in expected.items():
        table[:, kind] = value
    text.drafts.expect(table, recalls=True)
    found = []
    for stored in generations:
        text.texts.store(stored.texts, stored.seeds)
        text.texts.forget_recent()
        for response in stored.recent:
            text.texts.remember(response)
        text.begin(len(requests), [stop_token])
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        found.append(
            Answers(
                [list(output.outputs[0].token_ids) for output in outputs],
                text.counts(),
                int(metrics["vllm:num_preemptions"]),
            )
        )
    return found
