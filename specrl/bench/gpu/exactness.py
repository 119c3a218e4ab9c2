"""The section on exactness: speculative against plain tokens, with and without CUDA graphs, in FP32 and in BF16."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from specrl.bench.gpu.findings import NEEDS_GPU, Findings, Table
from specrl.bench.gpu.models import Scale, bench_config, likely_tokens, write_drafter, write_sharp
from specrl.config import Config
from specrl.rollout.engine import Engine, Request, response_seed
from specrl.rollout.exactness import measure_parity, noise_of_shapes, traces

MAX_LENGTH = 192
K = 3
VARIANTS = (
    ("float32", "eagle3"),
    ("float32", "ngram"),
    ("bfloat16", "eagle3"),
    ("bfloat16", "ngram"),
)
TINY_VARIANTS = (("float32", "eagle3"), ("bfloat16", "ngram"))
REQUESTS = {"full": 64, "tiny": 8}


def measure(scale: Scale, folder: Path) -> Findings:
    """Compare plain with speculative responses to the same requests, token by token, for every kind of engine."""
    found = Findings()
    found.text.append(
        "Every response is generated plainly and with drafts, at several temperatures, top-p and top-k, with the same "
        "seeds. A difference counts once for a response, and must be a near-tie: closer to the edge of the CDF than "
        "plain decoding itself moves between two batch sizes. Unexplained differences must be 0, and in FP32 without "
        "graphs all of them."
    )
    columns = ("type", "drafts", "CUDA graphs", ">tokens", ">accepted drafts", ">near-ties", ">unexplained", ">noise")
    table = found.table("Speculative against plain tokens", columns)
    policies = {dtype: write_sharp(folder / f"sharp-{dtype}", dtype, MAX_LENGTH) for dtype in ("float32", "bfloat16")}
    for dtype, method in VARIANTS if scale.name == "full" else TINY_VARIANTS:
        policy = policies[dtype]
        drafter = write_drafter(folder / f"drafter-{dtype}", policy) if method == "eagle3" else None
        for graphs in (False, True):
            if graphs and not torch.cuda.is_available():
                table.add(dtype, method, "on", *[NEEDS_GPU] * 5)
                continue
            config = _config(policy, dtype, method, compiled=graphs)
            found.figures |= _compare(table, policy, drafter, config, REQUESTS[scale.name])
    return found


def _config(policy: Path, dtype: str, method: str, *, compiled: bool) -> Config:
    return bench_config(
        policy,
        MAX_LENGTH,
        model={"dtype": dtype},
        speculation={"method": method, "k": K, "adaptive": False},
        engine={"max_num_seqs": 64, "kv_cache_gib": 0.125, "gpu_memory_fraction": 0.3, "compile": compiled},
    )


def _compare(table: Table, policy: Path, drafter: Path | None, config: Config, count: int) -> dict[str, int]:
    """Add the row of one engine, and return its figures."""
    engine = Engine(policy, drafter, config=config, seed=0)
    requests = mixed_requests(count)
    noise = noise_of_shapes(engine, requests, traces(engine, requests, len(requests), 0), K)
    comparison = measure_parity(engine, requests, K, noise).comparison
    engine.set_k(K)
    accepted = engine.generate(requests).stats.num_accepted_tokens
    engine.shutdown()
    graphs = "on" if config.engine.compile else "off"
    table.add(
        config.model.dtype,
        config.speculation.method,
        graphs,
        comparison.num_tokens,
        accepted,
        len(comparison.divergences) - comparison.num_unexplained,
        comparison.num_unexplained,
        f"{noise.cdf:.1e}",
    )
    name = f"{config.model.dtype} {config.speculation.method} graphs {graphs}"
    return {f"{name}: differences": len(comparison.divergences), f"{name}: unexplained": comparison.num_unexplained}


def mixed_requests(count: int) -> list[Request]:
    """Return requests with random prompts of likely tokens, at several temperatures, top-p and top-k."""
    generator, tokens = random.Random(0), likely_tokens()
    settings = ((1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.9, 0), (0.0, 1.0, 0), (1.0, 1.0, 5), (1.3, 0.8, 8))
    requests = []
    for index in range(count):
        prompt = generator.choices(tokens, k=generator.randint(1, 64))
        temperature, top_p, top_k = settings[index % len(settings)]
        requests.append(Request(prompt, response_seed(0, 0, index, 0), 48, temperature, top_p, top_k))
    return requests
