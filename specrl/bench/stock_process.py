"""The process of `StockEngine`. It imports nothing that changes vLLM."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from specrl.processes import end_with_parent


def main(bench: Connection) -> None:
    """Start the engine that the parent describes, then generate on request until the connection is closed."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # ends vLLM's processes too
    end_with_parent(bench.recv(), signal.SIGTERM)
    from vllm import LLM, SamplingParams

    llm = LLM(**bench.recv())
    step, iterations = llm.llm_engine.step, 0

    def counted_step() -> Any:
        nonlocal iterations
        iterations += 1
        return step()

    llm.llm_engine.step = counted_step
    bench.send(None)
    while True:
        try:
            prompts, params, fresh = bench.recv()
        except EOFError:
            return
        if fresh:
            llm.reset_prefix_cache()
        iterations, started = 0, time.perf_counter()
        outputs = llm.generate(prompts, [SamplingParams(**asked) for asked in params], use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        bench.send((seconds, tokens, iterations))
