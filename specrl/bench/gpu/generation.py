"""The section `generation` of `specrl bench gpu`: specrl's engine against stock vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from specrl.bench.acceptance import accepting_at
from specrl.bench.gpu.models import Row, Scale, bench_config, write_config, write_untrained_drafter
from specrl.bench.stock import StockEngine, StockError
from specrl.config import Config
from specrl.config.methods import EAGLE3 as SHIPPED
from specrl.models.shapes import model_shape
from specrl.projection.simulator.engine import HARDWARE, EngineModel
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.drafts.cost_model import possible_lengths
from specrl.rollout.engine import Engine, Generation, Request
from specrl.rollout.sampling.verification import Sampling
from specrl.rollout.vllm.engine.arguments import schedule

K = 3
RATES = {2.0: 0.5437, 2.5: 0.6914, 3.0: 0.8105}
"""Acceptance lengths, each with the per-token rate r that gives it: 1 + r + r^2 + ... + r^K."""
PROMPT_TOKENS = 64
DUMMY = {"load_format": "dummy"}
MEMORY = {"gpu_memory_fraction": 0.28, "kv_cache_gib": 0.125}  # three engines coexist
LENGTH = 2.5  # of stock vLLM's EAGLE-3 and of adaptive drafting
STOCK, EAGLE3 = "stock vLLM", f"stock vLLM, its EAGLE-3, k = {K}, acceptance {LENGTH}"


class Decoding(NamedTuple):
    """The decoding of a batch of requests, except for the first token of each."""

    seconds: float
    iterations: int
    stats: SpeculationStats
    k: float | None = None  # mean, of specrl's engine


Contenders = dict[str, Callable[[list[Request]], Decoding]]


def measure(scale: Scale, folder: Path) -> Iterator[Row]:
    """Time the shipped 8B shape with dummy weights: stock vLLM, plain and with its own EAGLE-3, and specrl's engine.

    Acceptance is synthetic, but all work of verification is done. The engines take turns. Times cover decoding alone:
    the time of a run with one token per request is subtracted. Rates are medians, with the slowest and the fastest;
    `of_plain` and `of_eagle3` are relative to stock vLLM. `projected_ms` is the simulator's time per iteration.
    """
    max_length = PROMPT_TOKENS + 2 * scale.new_tokens
    policy = write_config(scale.served, max_length + 2 * K + 1, folder / "served")
    drafter = write_untrained_drafter(policy, range(scale.draft_vocab), folder / "drafts")
    on_gpu = torch.cuda.is_available()
    config = bench_config(
        policy,
        max_length,
        speculation={"method": "eagle3", "k": K},
        drafter={"draft_vocab_size": scale.draft_vocab},
        engine=MEMORY | {"max_num_seqs": max(scale.batches), "compile": on_gpu},
    )
    speculative: dict[str, Any] = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": K}
    speculative |= {"draft_load_config": {"load_format": "auto"}}
    stock = {STOCK: StockEngine(policy, config, folder / "stock.log", overrides=DUMMY)}
    if on_gpu:
        rates = [RATES[LENGTH] ** tokens for tokens in range(1, K + 1)]
        made_up = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        both = DUMMY | {"speculative_config": speculative | made_up}
        try:
            stock[EAGLE3] = StockEngine(policy, config, folder / "stock-eagle3.log", overrides=both)
        except StockError as error:  # the other engines are still worth measuring
            yield {"engine": EAGLE3, "error": str(error)}
    lengths = schedule(max(scale.batches), possible_lengths(K, K))
    own = speculative | SHIPPED | {"num_speculative_tokens_per_batch_size": lengths}
    engine = Engine(policy, drafter, config=config, seed=0, overrides=DUMMY | {"speculative_config": own})
    engine.stop_tokens = []  # every response has the same length
    made = {length: accepting_at(rate, engine.sampler, scale.served.vocab_size) for length, rate in RATES.items()}
    contenders: Contenders = {name: partial(_stock_decoding, process) for name, process in stock.items()}
    contenders["specrl, plain"] = partial(_own_decoding, engine, 0, engine.sampler.sampling)
    for length, sampling in made.items():
        contenders[f"specrl, k = {K}, acceptance {length}"] = partial(_own_decoding, engine, K, sampling)
    contenders[f"specrl, adaptive, acceptance {LENGTH}"] = partial(_own_decoding, engine, None, made[LENGTH])
    for batch in scale.batches:
        yield from _compare(contenders, batch, scale, config)
    engine.shutdown()
    for process in stock.values():
        process.shutdown()


def _compare(contenders: Contenders, batch: int, scale: Scale, config: Config) -> Iterator[Row]:
    asked, tokens = _requests(batch, scale), batch * (scale.new_tokens - 1)
    _, *rounds = [[decode(asked) for decode in contenders.values()] for _ in range(scale.repeats + 1)]  # one warms up
    found = dict(zip(contenders, zip(*rounds, strict=True), strict=True))
    seconds = {name: median(decoding.seconds for decoding in decodings) for name, decodings in found.items()}
    for name, (one, *_) in found.items():
        times = [decoding.seconds for decoding in found[name]]
        yield {
            "engine": name,
            "batch": batch,
            "tokens_per_s": tokens / seconds[name],
            "slowest": tokens / max(times),
            "fastest": tokens / min(times),
            "acceptance_length": None if one.k is None else one.stats.acceptance_length,
            "k": one.k or 0.0,
            "of_plain": seconds[STOCK] / seconds[name],
            "of_eagle3": seconds[EAGLE3] / seconds[name] if EAGLE3 in seconds else None,
            "iterations": one.iterations,
            "iteration_ms": median(1e3 * decoding.seconds / decoding.iterations for decoding in found[name]),
            "projected_ms": None if one.k is None else _projected_ms(one.k, one, tokens, scale, config),
        }


def _projected_ms(k: float, decoding: Decoding, tokens: int, scale: Scale, config: Config) -> float | None:
    # For the mean number of running requests; None for a GPU that the simulator does not know.
    running = tokens / decoding.iterations / decoding.stats.acceptance_length
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    gpu = next((hardware for kind, hardware in HARDWARE.items() if kind in name), None)
    if gpu is None:
        return None
    shape, vocab = model_shape(config.model), scale.draft_vocab
    model = EngineModel(shape, gpu, k=k, prompt_tokens=PROMPT_TOKENS, draft_vocab_size=vocab)
    return 1e3 * model.at(running, scale.new_tokens / 2)


def _stock_decoding(engine: StockEngine, asked: list[Request]) -> Decoding:
    return _decoding(asked, lambda requests: engine.generate(requests, len(requests))[0])


def _own_decoding(engine: Engine, k: int | None, sampling: Sampling, asked: list[Request]) -> Decoding:
    assert engine.drafting is not None
    drafting = engine.drafting

    def generate(requests: list[Request]) -> Generation:
        engine.reset_prefix_cache()
        drafting.metrics()  # resets the count of draft lengths
        return engine.generate(requests, learn=k is None)

    engine.set_k(k)
    engine.sampler.sampling = sampling
    decoding = _decoding(asked, generate)
    return decoding._replace(k=drafting.metrics().get("spec/k", 0.0))


def _decoding(asked: list[Request], generate: Callable[[list[Request]], Generation]) -> Decoding:
    first, whole = generate([replace(request, max_tokens=1) for request in asked]), generate(asked)
    iterations = whole.stats.decode_steps - first.stats.decode_steps
    return Decoding(whole.seconds - first.seconds, iterations, whole.stats)


def _requests(count: int, scale: Scale) -> list[Request]:
    generator = random.Random(count)
    prompts = [[generator.randrange(3, scale.served.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    return [Request(prompt, seed, scale.new_tokens, 1.0) for seed, prompt in enumerate(prompts)]
