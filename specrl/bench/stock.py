"""Stock vLLM in its own process: the baseline for generation.

It uses vLLM's own sampler, scheduler and limits, and asynchronous scheduling and CUDA graphs where the device supports
them. Its environment variables and compiled kernels differ from those of `VllmEngine`, hence the separate process,
which runs `stock_process`.
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
from specrl.distributed import VARIABLES
from specrl.processes import OF_RANKS, last_line, start_helper
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.requests import Generation, Request
from specrl.rollout.vllm.engine.arguments import BATCH_INVARIANT, ENVIRONMENT

KEPT_VARIABLES = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL", "HF_HUB_OFFLINE")
"""The variables of `ENVIRONMENT` that stock vLLM gets too: cores for its threads, and no telemetry."""
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens")  # the fields of a request that it receives
FREE_SHARE = 0.92  # at most, of a GPU's free memory
ANSWER_SECONDS = 3600  # to start or to generate one batch
POLLING_SECONDS = 1.5  # a vLLM worker polls after its last command, which occupies most of a core
EXIT_SECONDS = 30  # to exit after being told to


class StockError(RuntimeError):
    """Stock vLLM did not start, or ended early."""


class StockEngine:
    """A process with stock vLLM; plain decoding unless `overrides` say otherwise."""

    def __init__(
        self, policy_dir: Path, config: Config, log: Path, *, overrides: Mapping[str, Any] | None = None
    ) -> None:
        """Start the engine and wait until it can generate; StockError if it does not start.

        It computes in `model.dtype` and ignores FP8 recipes in `policy_dir`. On a CPU, only `engine.compile` enables
        compilation. `overrides` are arguments of vLLM's `LLM`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w") as output:
            environment = stock_environment(os.environ)
            self._process, self._engine = start_helper("specrl.bench.stock_process", environment, output)
        self._ask(stock_arguments(policy_dir, config, gpu_share(config)) | dict(overrides or {}))

    def generate(self, requests: Sequence[Request], batch: int) -> list[Generation]:
        """Generate exactly `max_tokens` tokens for each request, `batch` requests at a time, without cached prompts.

        Stop tokens end nothing. The tokens are not returned, since vLLM's sampler uses other random numbers. All
        iterations, including those of prefill, count as `decode_steps`.
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
            time.sleep(POLLING_SECONDS)  # or it would slow down the next measurement
        return [Generation([], SpeculationStats(decode_steps=steps), took, made) for took, made, steps in answers]

    def shutdown(self) -> None:
        """End the process and those that vLLM started for it, some of which would outlive it."""
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
    """The fraction of the GPU's memory left for it by the engines already there; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return min(config.engine.gpu_memory_fraction, FREE_SHARE * free / total)


def stock_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """This process's environment variables, without those meant for its own engine."""
    own = ENVIRONMENT | VARIABLES | {BATCH_INVARIANT: "1"}
    kept = {name: value for name, value in environment.items() if name not in OF_RANKS}
    kept = {name: value for name, value in kept.items() if name in KEPT_VARIABLES or own.get(name) != value}
    return {"OMP_NUM_THREADS": "1"} | {name: ENVIRONMENT[name] for name in KEPT_VARIABLES} | kept


def stock_arguments(policy_dir: Path, config: Config, share: float | None) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`: model, length and memory; everything else keeps vLLM's default."""
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
