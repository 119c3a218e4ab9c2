"""The section on generation: vLLM as it comes against speculation, for a policy of an 8B model's shape.

The weights are dummies, so that no draft would ever be accepted: the acceptance is made up, and everything else is
real. What the engine takes of the GPU's memory is compared with the plan.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specrl.bench.gpu.findings import NEEDS_GPU, Findings
from specrl.bench.gpu.models import Scale, bench_config, write_config, write_random_drafter
from specrl.config import Config
from specrl.projection.budgets import rank_of
from specrl.projection.memory import GIB, engine_items
from specrl.rollout.engine import Engine, Request
from specrl.rollout.vllm.default_engine import DefaultEngine, GpuShare

K = 3
ACCEPTANCE_LENGTHS = (2.0, 2.5, 3.0)
PROMPT_TOKENS = 64
DUMMY = {"load_format": "dummy"}


def measure(scale: Scale, folder: Path) -> Findings:
    """Time plain generation on both engines, and speculation at made-up acceptance lengths."""
    max_length = PROMPT_TOKENS + 2 * scale.new_tokens
    policy = write_config(scale.served, max_length + 2 * K + 1, folder / "served")
    drafter = write_random_drafter(scale.served, scale.draft_vocab, folder / "drafts")
    config = _config(policy, max_length, scale)
    found = Findings()
    found.text.append(
        "Dummy weights; the acceptance is made up, after all of its work was done. `default` is vLLM as it comes, in a "
        "process of its own: its own sampler, scheduler and limits, asynchronous scheduling and CUDA graphs where "
        f"there is a GPU. Every request has {PROMPT_TOKENS} prompt tokens and {scale.new_tokens} new ones; rates are "
        f"medians of {scale.repeats} runs of all requests of a batch at once. k = {K}."
    )
    default = _default_rates(policy, drafter, config, scale, folder, found)
    free = _free_gib()
    speculative = drafts_of(drafter) | {"num_speculative_tokens_per_batch_size": [(1, max(scale.batches), K)]}
    overrides = {**DUMMY, "speculative_config": speculative}
    engine = Engine(policy, drafter, config=config, seed=0, overrides=overrides)
    _compare_memory(config, scale, free - _free_gib(), found)
    engine.stop_tokens = []  # every response has the same length
    _own_rates(engine, scale, default, found)
    _shares(engine, scale, found)
    engine.shutdown()
    return found


def _config(policy: Path, max_length: int, scale: Scale) -> Config:
    cuda = torch.cuda.is_available()
    return bench_config(
        policy,
        max_length,
        speculation={"method": "eagle3", "k": K, "adaptive": False},
        drafter={"draft_vocab_size": scale.draft_vocab},
        engine={
            "max_num_seqs": max(scale.batches),
            "gpu_memory_fraction": 0.85,
            "kv_cache_gib": 0.125,
            "compile": cuda,
        },
    )


def drafts_of(drafter: Path) -> dict[str, Any]:
    """Return vLLM's `speculative_config` for a drafter with weights beside a policy without."""
    return {
        "method": "eagle3",
        "model": str(drafter),
        "num_speculative_tokens": K,
        "draft_load_config": {"load_format": "auto"},
    }


def requests(count: int, scale: Scale) -> list[Request]:
    """Return requests with random prompts, at temperature 1."""
    generator = random.Random(count)
    vocab = scale.served.vocab
    prompts = [[generator.randrange(3, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    return [Request(prompt, seed, scale.new_tokens, 1.0) for seed, prompt in enumerate(prompts)]


def _default_rates(
    policy: Path, drafter: Path, config: Config, scale: Scale, folder: Path, found: Findings
) -> dict[int, float]:
    """Return the tokens per second of vLLM's default engine by batch, and add those of vLLM's own speculation."""
    columns = ("engine", *(f">batch {batch}" for batch in scale.batches))
    table = found.table("vLLM as it comes, tokens/s", columns)
    gpu = GpuShare.beside(config, 0)
    engine = DefaultEngine(policy, config, folder / "default-engine.log", gpu=gpu, overrides=DUMMY)
    rates = {batch: _default_rate(engine, batch, scale) for batch in scale.batches}
    engine.shutdown()
    words = ", ".join(f"{name} {value}" for name, value in engine.facts.items())
    table.add(f"plain ({words})", *(f"{rate:.0f}" for rate in rates.values()))
    found.figures["default"] = {"facts": engine.facts, "tokens_per_s": rates}
    for length in ACCEPTANCE_LENGTHS:
        name = f"vLLM's own EAGLE-3, synthetic acceptance length {length}"
        if gpu is None:
            table.add(name, *[NEEDS_GPU] * len(scale.batches))
            continue
        synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
        overrides = {**DUMMY, "speculative_config": drafts_of(drafter) | synthetic}
        own = DefaultEngine(policy, config, folder / "default-eagle3.log", gpu=gpu, overrides=overrides)
        measured = {batch: _default_rate(own, batch, scale) for batch in scale.batches}
        own.shutdown()
        table.add(name, *(f"{rate:.0f} ({rate / rates[batch]:.2f}x)" for batch, rate in measured.items()))
        found.figures[name] = measured
    return rates


def _default_rate(engine: DefaultEngine, batch: int, scale: Scale) -> float:
    asked = requests(batch, scale)
    lengths = [scale.new_tokens] * batch
    engine.generate(asked, lengths, batch)  # warms up
    return median(sum(lengths) / sum(engine.generate(asked, lengths, batch)) for _ in range(scale.repeats))


def _own_rates(engine: Engine, scale: Scale, default: dict[int, float], found: Findings) -> None:
    lengths = (f">length {length}: tokens/s, of default" for length in ACCEPTANCE_LENGTHS)
    columns = ("batch", ">default, tokens/s", ">k = 0", ">of default", *lengths)
    table = found.table("specrl's engine against vLLM as it comes", columns)
    figures = found.figures["own"] = {}
    for batch in scale.batches:
        plain, _ = _own_rate(engine, batch, scale, None)
        cells, row = [], {"default": default[batch], "plain": plain}
        for length in ACCEPTANCE_LENGTHS:
            rate, measured = _own_rate(engine, batch, scale, length)
            cells.append(f"{rate:.0f} ({rate / default[batch]:.2f}x; length {measured:.2f})")
            row[f"length {length}"] = rate
        table.add(batch, f"{default[batch]:.0f}", f"{plain:.0f}", f"{plain / default[batch]:.2f}x", *cells)
        figures[batch] = row


def _own_rate(engine: Engine, batch: int, scale: Scale, length: float | None) -> tuple[float, float]:
    """Return tokens per second and the measured acceptance length; without `length` of plain decoding, k = 0."""
    asked, rates, measured = requests(batch, scale), [], 1.0
    engine.set_k(0 if length is None else K)
    for repeat in range(scale.repeats + 1):  # the first one warms up
        engine.reset_prefix_cache()
        if length is None:
            generation = engine.generate(asked)
        else:
            with engine.synthetic_acceptance(length):
                generation = engine.generate(asked)
            measured = generation.stats.acceptance_length
        if repeat:
            rates.append(generation.num_tokens / generation.seconds)
    return median(rates), measured


def _shares(engine: Engine, scale: Scale, found: Findings) -> None:
    """Add where the time of an iteration goes; timers wait for the GPU, so that parts add up to more than without."""
    parts = ("policy", "drafter", "sampler", "scheduler", "other")
    columns = ("batch", "k", ">iteration, ms", *(f">{part}" for part in parts[:-1]), ">other Python")
    table = found.table("Where the time of an iteration goes, by timers that wait for the device", columns)
    for batch in scale.batches:
        for k in (0, K):
            times = _profile(engine, requests(batch, scale), k)
            total = sum(times.values())
            table.add(batch, k, f"{1e3 * total:.2f}", *(f"{times[part] / total:.1%}" for part in parts))
            found.figures[f"iteration at batch {batch}, k = {k}"] = times


def _profile(engine: Engine, asked: Sequence[Request], k: int) -> dict[str, float]:
    engine.set_k(k)
    engine.reset_prefix_cache()
    with engine.profile() as times:
        if k:
            with engine.synthetic_acceptance(ACCEPTANCE_LENGTHS[1]):
                engine.generate(list(asked))
        else:
            engine.generate(list(asked))
    return times.per_iteration


def _compare_memory(config: Config, scale: Scale, taken: float, found: Findings) -> None:
    """Add what the engine took of the GPU at its start beside the plan's items."""
    rank = rank_of(config, "train", scale.served.planned(config.model.max_length))
    table = found.table("Memory of the engine, GiB", ("item", ">planned", ">measured"))
    for item in engine_items(rank, speculate=True):
        table.add(item.name, f"{item.gib:.2f}", "")
    if not torch.cuda.is_available():
        table.add("all of it, with the KV cache", f"{config.engine.kv_cache_gib:.2f} of KV cache", NEEDS_GPU)
        return
    total = torch.cuda.mem_get_info()[1] / GIB
    share = config.engine.gpu_memory_fraction * total
    table.add("all of it, with the KV cache", f"{share:.2f}", f"{taken:.2f}")
    found.figures["engine_gib"] = {"planned": share, "measured": taken}


def _free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / GIB if torch.cuda.is_available() else 0.0
