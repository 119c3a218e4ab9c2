"""Stock vLLM, in a process of its own: the plain generation that speculative generation is compared with.

It has vLLM's own sampler, scheduler and limits, asynchronous scheduling and CUDA graphs where the device has them. Its
environment variables and compiled kernels are not those of `VllmEngine`, hence the other process, which runs
`stock_process`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from specrl.config import Config
from specrl.distributed.ranks import VARIABLES
from specrl.processes import OF_RANKS, last_line, start_helper
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.requests import Generation, Request
from specrl.rollout.vllm.engine.arguments import BATCH_INVARIANT, ENVIRONMENT

KEPT_VARIABLES = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL", "HF_HUB_OFFLINE")
"""Those of `ENVIRONMENT` that stock vLLM gets too: the cores of its threads, and no reports to anybody."""
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens")  # what it is told of each request
FREE_SHARE = 0.92  # the most of a GPU's free memory that it takes
ANSWER_SECONDS = 3600  # to start or to generate one batch
POLLING_SECONDS = 1.5  # a worker of vLLM polls after its last order, which takes most of a core
EXIT_SECONDS = 30  # to end after it was told to


class StockError(RuntimeError):
    """Stock vLLM did not start, or it ended before it was told to."""


class StockEngine:
    """A process with stock vLLM, which decodes plainly unless `overrides` say otherwise."""

    def __init__(
        self, policy_dir: Path, config: Config, log: Path, *, overrides: Mapping[str, Any] | None = None
    ) -> None:
        """Start the engine, and wait until it can generate; StockError if it does not start.

        FP8 recipes in `policy_dir` are not read: it computes in `model.dtype`. On a CPU it is compiled only if
        `engine.compile` says so. `overrides` are arguments of vLLM's `LLM`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w") as output:
            environment = stock_environment(os.environ)
            self._process, self._engine = start_helper("specrl.bench.stock_process", environment, output)
        self._ask(stock_arguments(policy_dir, config, gpu_share(config)) | dict(overrides or {}))

    def generate(self, requests: Sequence[Request], batch: int) -> list[Generation]:
        """Generate exactly `max_tokens` tokens for each request, `batch` requests at a time, with no prompt cached.

        Its tokens are its own, since its sampler has other random numbers, and they are not returned; nothing ends at
        a stop token. Its iterations, the prompts' among them, count as `decode_steps`.
        """
        prompts = [{"prompt_token_ids": request.prompt_tokens} for request in requests]
        fixed = {"ignore_eos": True, "detokenize": False}
        params = [{name: getattr(request, name) for name in SAMPLING} | fixed for request in requests]
        parts = [slice(start, start + batch) for start in range(0, len(requests), batch)]
        answers = [self._ask((prompts[part], params[part], part.start == 0)) for part in parts]
        tokens, asked = sum(tokens for _, tokens, _ in answers), sum(request.max_tokens for request in requests)
        if tokens != asked:
            raise StockError(f"stock vLLM made {tokens} tokens instead of {asked}")
        if not torch.cuda.is_available():
            time.sleep(POLLING_SECONDS)  # or it would slow down what is measured next
        return [Generation([], SpeculationStats(decode_steps=steps), took, made) for took, made, steps in answers]

    def shutdown(self) -> None:
        """End the process, and those that vLLM has started for it, some of which outlive it."""
        self._engine.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ask(self, order: object) -> Any:
        how = f"gave no answer within {ANSWER_SECONDS} s"
        try:
            self._engine.send(order)
            if self._engine.poll(ANSWER_SECONDS):
                return self._engine.recv()
        except (EOFError, OSError):
            how = "ended"
        self._kill()
        raise StockError(f"stock vLLM {how}: {last_line(self._log)} (log: {self._log})")


def gpu_share(config: Config) -> float | None:
    """The part of the GPU's memory that it may take, beside the engines that are there; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return min(config.engine.gpu_memory_fraction, FREE_SHARE * free / total)


def stock_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """This process's variables, without those that are meant for its own engine."""
    own = ENVIRONMENT | VARIABLES | {BATCH_INVARIANT: "1"}
    kept = {name: value for name, value in environment.items() if name not in OF_RANKS}
    kept = {name: value for name, value in kept.items() if name in KEPT_VARIABLES or own.get(name) != value}
    return {"OMP_NUM_THREADS": "1"} | {name: ENVIRONMENT[name] for name in KEPT_VARIABLES} | kept


def stock_arguments(policy_dir: Path, config: Config, share: float | None) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`: the model, its length, its memory, and nothing that vLLM chooses itself."""
    arguments: dict[str, Any] = {
        "model": str(policy_dir),
        "dtype": config.model.dtype,
        "seed": config.seed,
        "max_model_len": config.model.max_length,
        "tensor_parallel_size": config.engine.tensor_parallel,
        "generation_config": "vllm",
    }
    if share is not None:
        return arguments | {"gpu_memory_utilization": share}
    cache = int(config.engine.kv_cache_gib * 2**30)
    return arguments | {"kv_cache_memory_bytes": cache, "enforce_eager": not config.engine.compile}
