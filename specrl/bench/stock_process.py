"""The process of `StockEngine`. It imports what stock vLLM imports, and nothing that changes vLLM."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from specrl.processes import end_with_parent


def main(bench: Connection) -> None:
    """Start the engine that `bench` describes, then generate what it asks for, until it closes the connection."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # vLLM's processes end too
    end_with_parent(bench.recv(), signal.SIGTERM)
    log, arguments = bench.recv()
    with Path(log).open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    bench.send(None)
    while True:
        try:
            prompts, params, fresh = bench.recv()
        except EOFError:
            return
        if fresh:
            llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = llm.generate(prompts, [SamplingParams(**asked) for asked in params], use_tqdm=False)
        bench.send((time.perf_counter() - started, sum(len(output.outputs[0].token_ids) for output in outputs)))
