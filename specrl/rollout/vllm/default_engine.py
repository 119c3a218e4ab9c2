"""Stock vLLM, in a process of its own: the plain generation that speculative generation is compared with.

Such an engine has vLLM's own sampler, scheduler and limits, asynchronous scheduling and CUDA graphs where the device
has them. It runs in another process, because its environment variables and its compiled kernels are not those of
`VllmEngine`. The two processes exchange lines of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from specrl.config import Config
from specrl.processes import cpu_seconds, end_with_parent
from specrl.rollout.requests import Request
from specrl.rollout.vllm.cpu_kernels import STOCK
from specrl.rollout.vllm.engine.arguments import BATCH_INVARIANT, ENVIRONMENT

KEPT_VARIABLES = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL", "HF_HUB_OFFLINE")
"""The variables of `ENVIRONMENT` that a default engine gets too: its threads run on the cores of this process, and it
reports nothing to anybody."""
GROUP_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables by which this process has joined a process group, of which a default engine is no part."""
FREE_SHARE = 0.92
"""The part of a GPU's free memory that the engine takes at most."""
ANSWER_SECONDS = 3600
"""How long the engine may take to start, or to generate one batch, before it is killed."""
QUIET_SECONDS, QUIET_SHARE = 0.2, 0.2
"""An engine is quiet when its processes took less than this share of a core for so many seconds."""
UNQUIET_SECONDS = 5
"""How long it is waited for at most."""
EXIT_SECONDS = 30
"""How long the engine may take to end after it was told to."""


class DefaultEngineError(RuntimeError):
    """vLLM's default engine did not start, or it ended before it was told to."""


class DefaultEngine:
    """A process with vLLM's default engine, which decodes plainly unless `overrides` say otherwise."""

    def __init__(
        self,
        policy_dir: Path,
        config: Config,
        log: Path,
        *,
        gpu: GpuShare | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the engine, and wait until it can generate.

        Args:
            policy_dir: The policy's Hugging Face directory. FP8 recipes in it are not read: the engine computes in
                `model.dtype`.
            config: The configuration, of which the model's type and length, the seed, the size of the engine's group
                and of its KV cache are read. On a CPU the engine is compiled only if `engine.compile` says so.
            log: The file that gets what the engine prints.
            gpu: The GPUs and the share of their memory; None on a CPU.
            overrides: Further arguments of vLLM's `LLM`.

        Raises:
            DefaultEngineError: The engine did not start; the message has the last line of the log.
        """
        self._log = log
        environment = default_environment(os.environ)
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu.devices
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "specrl.rollout.vllm.default_engine", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                start_new_session=True,
            )
        self.facts: dict[str, Any] = self._ask(default_arguments(policy_dir, config, gpu) | dict(overrides or {}))
        """What it runs with: `async_scheduling`, `max_num_seqs`, `max_num_batched_tokens`, `eager` and `dtype`."""

    def generate(self, requests: Sequence[Request], lengths: Sequence[int], batch: int) -> list[float]:
        """Generate exactly so many tokens for each request, with no prompt cached and `batch` requests at a time.

        The tokens are the engine's own, since its sampler has other random numbers. The work is that of responses of
        these lengths: nothing ends at a stop token.

        Returns:
            The seconds that each batch took.

        Raises:
            DefaultEngineError: The engine has ended, or has not answered within `ANSWER_SECONDS`.
        """
        parts = [slice(start, start + batch) for start in range(0, len(requests), batch)]
        seconds = [self._generate(requests[part], lengths[part], fresh=part.start == 0) for part in parts]
        self._await_quiet()
        return seconds

    def _generate(self, requests: Sequence[Request], lengths: Sequence[int], *, fresh: bool) -> float:
        asked = [
            {
                "prompt": request.prompt_tokens,
                "max_tokens": length,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,
            }
            for request, length in zip(requests, lengths, strict=True)
        ]
        answer = self._ask({"requests": asked, "fresh": fresh})
        if answer["tokens"] != sum(lengths):
            raise DefaultEngineError(f"vLLM's default engine made {answer['tokens']} tokens instead of {sum(lengths)}")
        return float(answer["seconds"])

    def _await_quiet(self) -> None:
        """Wait until the engine computes no more, or it would slow down what is measured next.

        A worker of vLLM polls for a second after its last order, and takes most of a core for it.
        """
        deadline, before = time.monotonic() + UNQUIET_SECONDS, cpu_seconds(self._process.pid)
        while time.monotonic() < deadline:
            time.sleep(QUIET_SECONDS)
            now = cpu_seconds(self._process.pid)
            if now - before < QUIET_SHARE * QUIET_SECONDS:
                return
            before = now

    def shutdown(self) -> None:
        """End the process; after an error it is killed."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # an order that a dead process never read is still in the buffer
                    stream.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        """Kill the process and those that vLLM has started for it, some of which outlive it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        expired = threading.Event()

        def give_up() -> None:
            expired.set()
            self._kill()

        limit = threading.Timer(ANSWER_SECONDS, give_up)
        limit.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            limit.cancel()
        if not line:
            self.shutdown()
            lines = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            how = f"gave no answer within {ANSWER_SECONDS} s" if expired.is_set() else "ended"
            raise DefaultEngineError(f"vLLM's default engine {how}: {lines[-1]} (log: {self._log})")
        answer: dict[str, Any] = json.loads(line)
        return answer


class GpuShare:
    """The GPUs of a default engine, and the part of their memory that it may take."""

    def __init__(self, devices: str, share: float) -> None:
        self.devices = devices
        """The value of CUDA_VISIBLE_DEVICES."""
        self.share = share
        """The fraction of a GPU's memory."""

    @classmethod
    def beside(cls, config: Config, local_rank: int) -> GpuShare | None:
        """The share that the GPUs of this rank's engine have free at the moment; None on a CPU.

        Raises:
            DefaultEngineError: This rank does not see all GPUs of its engine.
        """
        import torch

        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info()
        share = min(config.engine.gpu_memory_fraction, FREE_SHARE * free / total)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        return cls(engine_devices(visible.split(","), local_rank, config.engine.tensor_parallel), share)


def engine_devices(visible: Sequence[str], local_rank: int, size: int) -> str:
    """The GPUs of the engine that this rank belongs to, as CUDA_VISIBLE_DEVICES wants them.

    Args:
        visible: The GPUs that this rank sees.
        local_rank: The number of the rank's own GPU among these.
        size: The number of GPUs of an engine.

    Raises:
        DefaultEngineError: The rank sees fewer GPUs than its engine has.
    """
    first = local_rank // size * size
    if first + size > len(visible):
        raise DefaultEngineError(
            f"vLLM's default engine needs {size} GPUs in one process, and this rank sees {len(visible)}: "
            'cluster.sbatch.gpu-bind = "none" shows each rank all GPUs of its node'
        )
    return ",".join(visible[first : first + size])


def default_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a default engine: this process's, without those that are meant for its own engine."""
    own = ENVIRONMENT | {BATCH_INVARIANT: "1"}
    ours = {name: value for name, value in own.items() if name not in KEPT_VARIABLES}
    kept = {name: value for name, value in environment.items() if name not in GROUP_VARIABLES}
    kept = {name: value for name, value in kept.items() if ours.get(name) != value}
    return {**{name: ENVIRONMENT[name] for name in KEPT_VARIABLES}, **kept, STOCK: "1"}


def default_arguments(policy_dir: Path, config: Config, gpu: GpuShare | None) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`: the model, its length, its memory, and nothing that vLLM chooses itself."""
    arguments: dict[str, Any] = {
        "model": str(policy_dir),
        "dtype": config.model.dtype,
        "seed": config.seed,
        "max_model_len": config.model.max_length,
        "tensor_parallel_size": config.engine.tensor_parallel,
        "generation_config": "vllm",
    }
    if gpu is not None:
        return arguments | {"gpu_memory_utilization": gpu.share}
    cache = int(config.engine.kv_cache_gib * 2**30)
    return arguments | {"kv_cache_memory_bytes": cache, "enforce_eager": not config.engine.compile}


def serve(parent: int, channel: IO[str]) -> None:
    """Start the engine of the first line on standard input, then do what the others ask, until standard input ends.

    Args:
        parent: The process that gives the orders.
        channel: Where the answers go.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(0, signal.SIGKILL))  # vLLM's processes end too
    end_with_parent(parent, signal.SIGTERM)
    llm = _start(json.loads(sys.stdin.readline()))
    _answer(channel, _facts(llm))
    for line in sys.stdin:
        order = json.loads(line)
        _answer(channel, _generate(llm, order["requests"], fresh=order["fresh"]))


def _start(arguments: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(**arguments)


def _facts(llm: Any) -> dict[str, Any]:
    config = llm.llm_engine.vllm_config
    return {
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "eager": bool(config.model_config.enforce_eager),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
    }


def _generate(llm: Any, requests: list[dict[str, Any]], *, fresh: bool) -> dict[str, Any]:
    from vllm import SamplingParams

    if fresh:
        llm.reset_prefix_cache()
    params = [
        SamplingParams(
            temperature=asked["temperature"],
            top_p=asked["top_p"],
            top_k=asked["top_k"],
            max_tokens=asked["max_tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        for asked in requests
    ]
    prompts = [{"prompt_token_ids": asked["prompt"]} for asked in requests]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}


def _answer(channel: IO[str], answer: Mapping[str, Any]) -> None:
    channel.write(json.dumps(answer) + "\n")
    channel.flush()


if __name__ == "__main__":
    # What vLLM prints goes to the log, and only answers to the pipe.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(int(sys.argv[1]), answers)
