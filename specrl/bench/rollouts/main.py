"""`specrl bench rollouts`: measure, then write the rows and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from specrl.bench.job import BenchJob, say
from specrl.bench.options import RolloutOptions
from specrl.bench.pages import ratios, titled
from specrl.bench.rollouts import carried
from specrl.bench.rollouts.engines import Engines
from specrl.bench.rollouts.rounds import ACCEPTANCE, LEAST_REQUESTS, RATE, measure, rounds_of, rows_of, write_rounds
from specrl.bench.stock import StockEngine
from specrl.config import Config
from specrl.data.problems import Prompt, derive_seed
from specrl.data.prompts import PromptSource
from specrl.distributed import join, leave
from specrl.models.sources import load_tokenizer
from specrl.rollout.collect import Origin, make_request
from specrl.rollout.engine import Request, StoredText

POOL_SIZE = 64
HOW = """
Run `{run}`. The requests are held-out prompts whose responses reach {max_tokens} tokens (or else the longest ones) and
are cut there, so that the batch size stays constant. Every round uses different prompts; below batch size 8 it has
eight of them, in consecutive batches. Times include prefill. Plain decoding has its own engine without a drafter.
*over stock* is the ratio to stock vLLM in its own process, with its own sampler, scheduler and limits, asynchronous
scheduling and CUDA graphs (on a GPU), and as many tokens per prompt; for plain decoding (k = 0) it compares the two
baselines. k is the draft length; with `adaptive` the engine chooses it, after uncounted runs that measure its
iteration times. Replay drafts from one stored response per prompt, sampled from the same policy with other seeds.
"""
COLUMNS = titled("batch", "method", "k") | RATE | {"over stock": "speedup_over_stock"} | ACCEPTANCE
COLUMNS |= {"steps": "decode_steps"}


def main(job: BenchJob, options: RolloutOptions) -> None:
    """Measure every variant at every batch size, and write the rows and the page after each batch size."""
    subject = job.subject
    join()
    source = PromptSource(subject.config, load_tokenizer(subject.policy_dir), prompts_dir=subject.prompts_dir)
    prompts = source.held_out(min(POOL_SIZE, subject.config.validate_.num_prompts))
    requests = pool(prompts, subject.config)
    if options.after_update:
        carried.measure(job, subject, requests[: max(options.batches)], options.max_tokens)
        leave()
        return
    engines = Engines(subject, options)
    others = pool(prompts, subject.config, "bench replay")
    natural, stored = (
        [response.tokens for response in engines.variants[0].engine.generate(asked).responses]
        for asked in (requests, others)
    )
    lengths = {request.seed: len(tokens) for request, tokens in zip(requests, natural, strict=True)}
    stock = engines.start_stock(job.folder)
    texts = zip(others, stored, strict=True)
    engines.add_methods([StoredText(asked.prompt_tokens, tokens) for asked, tokens in texts])
    rows: list[dict[str, Any]] = []
    how = HOW.format(run=job.run_dir and job.run_dir.name, max_tokens=options.max_tokens)
    for batch in options.batches:
        lasting = longest(requests, lengths, max(batch, LEAST_REQUESTS), options.max_tokens)
        rows += measure_batch(engines, stock, rounds_of(lasting, batch, options.repeats), batch)
        write_rounds(job, rows, "Speculative against plain rollouts", how, COLUMNS, options.repeats)
    engines.shutdown()
    stock.shutdown()
    leave()


def pool(prompts: Sequence[Prompt], config: Config, stream: str = "bench") -> list[Request]:
    """Make 64 requests of natural length; if there are fewer prompts, repeat them with other seeds."""
    origin, count = Origin(derive_seed(config.seed, stream), step=0), len(prompts)
    return [make_request(prompts[index % count], index // count, config, origin) for index in range(POOL_SIZE)]


def longest(requests: Sequence[Request], lengths: dict[int, int], count: int, max_tokens: int) -> list[Request]:
    """Select the requests whose responses reach `max_tokens`, cut there; at least `count`, the longest first.

    No request asks for more tokens than its response has, because stock vLLM generates exactly as many as requested.
    """
    cut = [replace(request, max_tokens=min(lengths[request.seed], max_tokens)) for request in requests]
    lasting = sum(request.max_tokens == max_tokens for request in cut)
    return sorted(cut, key=lambda request: -request.max_tokens)[: max(count, lasting)]


def measure_batch(
    engines: Engines, stock_vllm: StockEngine, rounds: list[list[Request]], batch: int
) -> list[dict[str, Any]]:
    """Run all variants in all rounds; return their rows, plain decoding first."""
    *measured, stock = measure([*engines.variants, stock_vllm], rounds, batch)
    rows, stock_rate = rows_of(engines.variants, measured, batch), median(stock.rates)
    for row, found in zip(rows, measured, strict=True):
        row["speedup_over_stock"] = ratios(found.rates, stock.rates).median
        row |= {"stock_tokens_per_s": stock_rate, "decode_steps": found.stats.decode_steps}
    plain = rows[0]["tokens_per_s"]
    words = ", ".join(f"{row['method']} k={row['k']} {row['speedup']:.2f}x" for row in rows[1:])
    say(f"batch {batch}: plain {plain:.0f} tokens/s, stock vLLM {stock_rate:.0f}; {words}")
    return rows
