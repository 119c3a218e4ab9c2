"""The section `generation` of `specrl bench gpu`: the engine against stock vLLM, and its memory against the plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specrl.bench.gpu.acceptance import RATES, K, SyntheticAcceptance
from specrl.bench.gpu.models import GIB, Row, Scale, bench_config, write_config, write_untrained_drafter
from specrl.bench.stock import StockEngine
from specrl.config import Config
from specrl.models.shapes import model_shape
from specrl.projection.budgets import rank_of
from specrl.projection.memory import engine_items, peak_gib
from specrl.rollout.engine import Engine, Request
from specrl.rollout.vllm.engine.arguments import schedule

PROMPT_TOKENS = 64
DUMMY = {"load_format": "dummy"}


def measure(scale: Scale, folder: Path) -> Iterator[Row]:
    """Time the shipped 8B shape with dummy weights: stock vLLM, plain and with its own EAGLE-3, and specrl's engine.

    Acceptance is made up, after all of its work was done. Rates are medians of runs of all requests of a batch at once.
    """
    max_length = PROMPT_TOKENS + 2 * scale.new_tokens
    policy = write_config(scale.served, max_length + 2 * K + 1, folder / "served")
    drafter = write_untrained_drafter(policy, range(scale.draft_vocab), folder / "drafts")
    memory = {"gpu_memory_fraction": 0.85, "kv_cache_gib": 0.125}
    config = bench_config(
        policy,
        max_length,
        speculation={"method": "eagle3", "k": K, "adaptive": False},
        drafter={"draft_vocab_size": scale.draft_vocab},
        engine=memory | {"max_num_seqs": max(scale.batches), "compile": torch.cuda.is_available()},
    )
    speculative: dict[str, Any] = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": K}
    speculative |= {"draft_load_config": {"load_format": "auto"}}
    stock: dict[int, float] = {}
    for row in _stock(policy, config, scale, folder, {}):
        stock[row["batch"]] = row["tokens_per_s"]
        yield row | {"of_stock": 1.0}
    yield from _own(policy, drafter, config, scale, speculative, stock)
    if torch.cuda.is_available():
        length = 2.5
        synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
        for row in _stock(policy, config, scale, folder, {"speculative_config": speculative | synthetic}):
            yield row | {"acceptance_length": length, "of_stock": row["tokens_per_s"] / stock[row["batch"]]}


def _stock(policy: Path, config: Config, scale: Scale, folder: Path, overrides: dict[str, Any]) -> Iterator[Row]:
    engine = StockEngine(policy, config, folder / "stock.log", overrides=DUMMY | overrides)
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
        for length in (None, *RATES):
            rate, found = _rate(engine, batch, scale, length)
            name = "specrl, plain" if length is None else f"specrl, k = {K}, acceptance {length}"
            row = {"engine": name, "batch": batch, "tokens_per_s": rate, "acceptance_length": found}
            yield row | {"of_stock": rate / stock[batch]}
    engine.shutdown()


def _free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / GIB if torch.cuda.is_available() else 0.0


def _rate(engine: Engine, batch: int, scale: Scale, length: float | None) -> tuple[float, float]:
    asked, rates, vocab_size = _requests(batch, scale), [], scale.served.vocab_size
    engine.set_k(0 if length is None else K)
    for repeat in range(scale.repeats + 1):  # the first one warms up
        engine.reset_prefix_cache()
        with SyntheticAcceptance(engine.sampler, RATES[length], vocab_size) if length else nullcontext():
            result = engine.generate(asked)
        if repeat:
            rates.append(result.num_tokens / result.seconds)
    return median(rates), result.stats.acceptance_length


def _requests(count: int, scale: Scale) -> list[Request]:
    generator = random.Random(count)
    prompts = [[generator.randrange(3, scale.served.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    return [Request(prompt, seed, scale.new_tokens, 1.0) for seed, prompt in enumerate(prompts)]
