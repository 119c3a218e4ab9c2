"""The sections of `specrl bench gpu` with engines: exactness, generation against stock vLLM, and sleep."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specrl.bench.gpu.arithmetic import Row
from specrl.bench.gpu.models import (
    GIB,
    LIKELY,
    SHARP,
    Scale,
    bench_config,
    write_config,
    write_policy,
    write_untrained_drafter,
)
from specrl.config import Config
from specrl.models.shapes import model_shape
from specrl.projection.budgets import rank_of
from specrl.projection.memory import engine_items, peak_gib
from specrl.rollout.engine import Engine, Request, response_seed
from specrl.rollout.exactness import measure_parity, noise_of_shapes, traces
from specrl.rollout.vllm.default_engine import DefaultEngine, GpuShare
from specrl.rollout.vllm.engine.arguments import schedule
from specrl.rollout.vllm.weights.load import read_weights

K = 3
MAX_LENGTH = 192
"""The longest sequence of the small models."""
PROMPT_TOKENS = 64
ACCEPTANCE_LENGTHS = (2.0, 2.5, 3.0)
"""Published ones; drafts for random weights would never be accepted."""
DUMMY = {"load_format": "dummy"}
SLEEPS = 3


def exactness(scale: Scale, folder: Path) -> Iterator[Row]:
    """Compare plain with speculative responses to the same requests, with and without CUDA graphs.

    A difference must be a near-tie: closer to the edge of the CDF than plain decoding itself moves between two batch
    sizes. Unexplained differences must be 0.
    """
    for dtype in ("float32", "bfloat16"):
        policy = write_policy(SHARP, MAX_LENGTH, folder / f"sharp-{dtype}", dtype, sharp=True)
        drafter = write_untrained_drafter(policy, LIKELY, folder / f"drafter-{dtype}")
        for method in ("eagle3", "ngram"):
            for graphs in (False, True) if torch.cuda.is_available() else (False,):
                config = _small_config(policy, dtype, method, compile=graphs)
                engine = Engine(policy, drafter if method == "eagle3" else None, config=config, seed=0)
                requests = mixed_requests(scale.requests)
                noise = noise_of_shapes(engine, requests, traces(engine, requests, len(requests), 0), K)
                comparison = measure_parity(engine, requests, K, noise).comparison
                engine.set_k(K)
                accepted = engine.generate(requests).stats.num_accepted_tokens
                engine.shutdown()
                yield {
                    "type": dtype,
                    "drafts": method,
                    "graphs": graphs,
                    "tokens": comparison.num_tokens,
                    "accepted": accepted,
                    "near_ties": len(comparison.divergences) - comparison.num_unexplained,
                    "unexplained": comparison.num_unexplained,
                    "noise": noise.cdf,
                }


def _small_config(policy: Path, dtype: str, method: str, **engine: Any) -> Config:
    return bench_config(
        policy,
        MAX_LENGTH,
        model={"dtype": dtype},
        speculation={"method": method, "k": K, "adaptive": False},
        engine={"max_num_seqs": 64, "kv_cache_gib": 0.125, "gpu_memory_fraction": 0.3, **engine},
    )


def mixed_requests(count: int) -> list[Request]:
    """Return requests with random prompts of likely tokens, at several temperatures, top-p and top-k."""
    generator = random.Random(0)
    settings = ((1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.9, 0), (0.0, 1.0, 0), (1.0, 1.0, 5), (1.3, 0.8, 8))
    return [
        Request(
            generator.choices(LIKELY, k=generator.randint(1, 64)),
            response_seed(0, 0, index, 0),
            48,
            *settings[index % len(settings)],
        )
        for index in range(count)
    ]


def sleep(scale: Scale, folder: Path) -> Iterator[Row]:
    """Let an engine sleep and wake, refit it, and compare what it then samples with what it sampled before."""
    del scale
    policy = write_policy(SHARP, MAX_LENGTH, folder / "asleep", "float32", sharp=True)
    drafter = write_untrained_drafter(policy, LIKELY, folder / "asleep-drafter")
    config = _small_config(policy, "float32", "eagle3", sleep=True)
    engine, requests = Engine(policy, drafter, config=config, seed=0), mixed_requests(16)
    before = [response.tokens for response in engine.generate(requests).responses]
    for cycle in range(1, SLEEPS + 1):
        awake = _free_gib()
        slept, asleep = _timed(engine.sleep), _free_gib()
        woke = _timed(engine.wake)
        refit = engine.refit(read_weights(policy), read_weights(drafter), cycle)
        same = [response.tokens for response in engine.generate(requests).responses] == before
        freed = {"free_awake_gib": awake, "free_asleep_gib": asleep}
        yield {"cycle": cycle, **freed, "sleep_s": slept, "wake_s": woke, "refit_s": refit, "same_tokens": same}
    engine.shutdown()


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / GIB if torch.cuda.is_available() else 0.0


def generation(scale: Scale, folder: Path) -> Iterator[Row]:
    """Time the shipped 8B shape with dummy weights: stock vLLM, plain and with its own EAGLE-3, and specrl's engine.

    Acceptance is made up, after all of its work was done. Rates are medians of runs of all requests of a batch at once.
    """
    max_length = PROMPT_TOKENS + 2 * scale.new_tokens
    policy = write_config(scale.served, max_length + 2 * K + 1, folder / "served")
    drafter = write_untrained_drafter(policy, range(scale.draft_vocab), folder / "drafts")
    config = bench_config(
        policy,
        max_length,
        speculation={"method": "eagle3", "k": K, "adaptive": False},
        drafter={"draft_vocab_size": scale.draft_vocab},
        engine={
            "max_num_seqs": max(scale.batches),
            "gpu_memory_fraction": 0.85,
            "kv_cache_gib": 0.125,
            "compile": torch.cuda.is_available(),
        },
    )
    speculative = {
        "method": "eagle3",
        "model": str(drafter),
        "num_speculative_tokens": K,
        "draft_load_config": {"load_format": "auto"},
    }
    stock: dict[int, float] = {}
    for row in _stock(policy, config, scale, folder, {}):
        stock[row["batch"]] = row["tokens_per_s"]
        yield row | {"of_stock": 1.0}
    yield from _own(policy, drafter, config, scale, speculative, stock)
    if torch.cuda.is_available():
        length = ACCEPTANCE_LENGTHS[1]
        synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
        for row in _stock(policy, config, scale, folder, {"speculative_config": speculative | synthetic}):
            yield row | {"acceptance_length": length, "of_stock": row["tokens_per_s"] / stock[row["batch"]]}


def _stock(policy: Path, config: Config, scale: Scale, folder: Path, overrides: dict[str, Any]) -> Iterator[Row]:
    gpu = GpuShare.beside(config, 0)
    engine = DefaultEngine(policy, config, folder / "stock.log", gpu=gpu, overrides=DUMMY | overrides)
    for batch in scale.batches:
        asked, lengths = _requests(batch, scale), [scale.new_tokens] * batch
        engine.generate(asked, lengths, batch)  # warms up
        rates = [sum(lengths) / sum(engine.generate(asked, lengths, batch)) for _ in range(scale.repeats)]
        name = "stock vLLM, its EAGLE-3" if overrides else "stock vLLM"
        yield {"engine": name, "batch": batch, "tokens_per_s": median(rates), "acceptance_length": 1.0}
    engine.shutdown()


def _own(
    policy: Path, drafter: Path, config: Config, scale: Scale, speculative: dict[str, Any], stock: dict[int, float]
) -> Iterator[Row]:
    free = _free_gib()
    both = speculative | {"num_speculative_tokens_per_batch_size": schedule(max(scale.batches), (0, K))}
    engine = Engine(policy, drafter, config=config, seed=0, overrides={**DUMMY, "speculative_config": both})
    if torch.cuda.is_available():
        planned = config.engine.gpu_memory_fraction * torch.cuda.mem_get_info()[1] / GIB
        items = peak_gib(engine_items(rank_of(config, "train", model_shape(config.model)), speculate=True))
        memory = {"planned_gib": planned, "measured_gib": free - _free_gib(), "without_cache_gib": items}
        yield {"engine": "specrl, memory", **memory}
    engine.stop_tokens = []  # every response has the same length
    for batch in scale.batches:
        for length in (None, *ACCEPTANCE_LENGTHS):
            rate, found = _rate(engine, batch, scale, length)
            ratio = rate / stock[batch]
            yield {
                "engine": "specrl, plain" if length is None else f"specrl, k = {K}, acceptance {length}",
                "batch": batch,
                "tokens_per_s": rate,
                "acceptance_length": found,
                "of_stock": ratio,
            }
    engine.shutdown()


def _rate(engine: Engine, batch: int, scale: Scale, length: float | None) -> tuple[float, float]:
    asked, rates, found = _requests(batch, scale), [], 1.0
    engine.set_k(0 if length is None else K)
    for repeat in range(scale.repeats + 1):  # the first one warms up
        engine.reset_prefix_cache()
        if length is None:
            result = engine.generate(asked)
        else:
            with engine.synthetic_acceptance(length):
                result = engine.generate(asked)
            found = result.stats.acceptance_length
        if repeat:
            rates.append(result.num_tokens / result.seconds)
    return median(rates), found


def _requests(count: int, scale: Scale) -> list[Request]:
    generator = random.Random(count)
    prompts = [[generator.randrange(3, scale.served.vocab) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    return [Request(prompt, seed, scale.new_tokens, 1.0) for seed, prompt in enumerate(prompts)]
