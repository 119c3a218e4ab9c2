"""The sections `exactness` and `invariance` of `specrl bench gpu`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from specrl.bench.gpu.models import LIKELY, SHARP, Row, Scale, bench_config, write_policy, write_untrained_drafter
from specrl.precision.near_ties import compare
from specrl.rollout.drafts.acceptance import DRAFTER, SourceCounts
from specrl.rollout.engine import Engine, Request, response_seed
from specrl.rollout.vllm.engine.arguments import gpu_memory
from specrl.validation.exactness import noise_of_shapes, recorded, texts_to_replay, traces

K = 3
MAX_LENGTH = 192
MEMORY = {"kv_cache_memory_bytes": 2**27, **gpu_memory(0.05)}  # whatever memory other processes allocate and free


def measure(scale: Scale, folder: Path, *, batch_invariant: bool = False) -> Iterator[Row]:
    """Compare plain and speculative responses to the same requests, with and without CUDA graphs.

    Every difference must be a near-tie: neither token leads by more than the lead varies between two batch sizes of
    plain decoding. Unexplained differences must be 0.
    """
    for dtype in ("float32", "bfloat16"):
        policy = write_policy(SHARP, MAX_LENGTH, folder / f"sharp-{dtype}", dtype, sharp=True)
        drafter = write_untrained_drafter(policy, LIKELY, folder / f"drafter-{dtype}")
        for method in ("eagle3+replay", "ngram"):
            for graphs in (False, True) if torch.cuda.is_available() else (False,):
                settings = {"compile": graphs, "batch_invariant": batch_invariant}
                config = bench_config(
                    policy,
                    MAX_LENGTH,
                    model={"dtype": dtype},
                    speculation={"method": method, "k": K, "adaptive": False},
                    engine={"max_num_seqs": 64} | settings,
                )
                engine = Engine(policy, drafter if method != "ngram" else None, config=config, seed=0, overrides=MEMORY)
                # Whole distributions: see `near_ties`.
                requests = [replace(asked, top_p=1.0, top_k=0) for asked in mixed_requests(scale.requests)]
                plain = traces(engine, requests, len(requests), 0)
                noise = noise_of_shapes(engine, requests, plain, K)
                if engine.replays:  # for the other half only the drafter drafts
                    engine.set_replay(texts_to_replay(requests, plain)[: len(requests) // 2])
                speculative, drafts = recorded(engine, requests, len(requests), K)
                comparison = compare(plain, speculative, noise)
                engine.shutdown()
                yield {
                    "type": dtype,
                    "drafts": method,
                    "graphs": graphs,
                    "tokens": comparison.num_tokens,
                    "accepted": drafts.num_accepted_tokens,
                    "of_drafter": drafts.by_source.get(DRAFTER, SourceCounts()).num_accepted_tokens,
                    "near_ties": len(comparison.divergences) - comparison.num_unexplained,
                    "unexplained": comparison.num_unexplained,
                    "noise": noise,
                }


def measure_invariance(scale: Scale, folder: Path) -> Iterator[Row]:
    """Compare as in `exactness`, with `engine.batch_invariant = true`; on CPUs, which lack such kernels, yield no rows.

    This mode has no near-ties: speculative responses must equal plain ones token for token.
    """
    if torch.cuda.is_available():
        yield from measure(scale, folder / "invariance", batch_invariant=True)


def mixed_requests(count: int) -> list[Request]:
    generator = random.Random(0)
    settings = ((1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.9, 0), (0.0, 1.0, 0), (1.0, 1.0, 5), (1.3, 0.8, 8))
    prompts = [generator.choices(LIKELY, k=generator.randint(1, 64)) for _ in range(count)]
    return [
        Request(prompt, response_seed(0, 0, index, 0), 48, *settings[index % len(settings)])
        for index, prompt in enumerate(prompts)
    ]
