"""`specrl bench rollouts`: measure, then write the rows and the page."""

from __future__ import annotations

import time
from typing import Any

import torch

from specrl.bench.job import BenchJob, say
from specrl.bench.options import RolloutOptions
from specrl.bench.pages import hardware, table, write_page, write_rows
from specrl.bench.rollouts.engines import Engines, stored_responses
from specrl.bench.rollouts.rounds import TAIL_SIZE, Measurement, Variant, Workload, compared, differing, measure
from specrl.bench.rollouts.workloads import pool, workloads
from specrl.bench.spread import Spread, ratios
from specrl.data.prompts import PromptSource
from specrl.distributed import join, leave
from specrl.models.sources import load_tokenizer

HOW = """
Run `{run}`. Every round runs every variant once on the same requests (same prompts, weights and seeds; the order
changes by round). The speedup of a round is the ratio of its tokens per second to those of plain decoding in that
round, shown as the median of {repeats} rounds with the least and the greatest. Plain decoding has an engine of its own
without a drafter. *over stock* is the ratio to stock vLLM, in a process of its own: its own sampler, scheduler and
limits, asynchronous scheduling and CUDA graphs where there is a GPU, and as many tokens after each prompt; in the row
of plain decoding (k = 0) this is the ratio of the two baselines. {wrong} of {total} speculative responses differ from
those of plain decoding in the same round; only rounding, which depends on the batch shape, may decide a near-tie
differently. At a fixed batch size the requests are held-out prompts whose
responses have at least {max_tokens} tokens and are cut there, so that the batch keeps its size; each round has other
prompts, and below batch 8 there are eight of them, one batch after another. `tail64` is 64 held-out prompts on one
rank, each to its natural end. Prefill is part of the time. k is the longest draft; `adaptive` leaves it to the engine,
after uncounted runs in which it learned its times. Replay has one stored response per prompt, sampled from the same
policy with other seeds.
"""
COLUMNS = {
    "batch": "batch",
    "method": "method",
    "k": "k",
    "tokens/s": "tokens_per_s",
    "speedup": "speedup",
    "over stock": "speedup_over_stock",
    "acceptance length": "acceptance_length",
    "by position": "acceptance_rate_per_pos",
    "steps": "decode_steps",
}


def main(job: BenchJob) -> None:
    """Measure every variant on every workload, and write the rows and the page after each of these."""
    ranks = join()
    lists = {key: tuple(job.options[key]) for key in ("methods", "ks", "batches")}
    options, subject = RolloutOptions(**{**job.options, **lists}), job.subject
    engines = Engines(subject, options)
    source = PromptSource(subject.config, load_tokenizer(subject.policy_dir), problems_dir=subject.config.problems_dir)
    prompts = source.held_out(min(TAIL_SIZE, subject.config.validate_.num_prompts))
    requests = pool(prompts, subject.config)
    answers = engines.plain.engine.generate(requests).responses
    lengths = {request.seed: len(answer.tokens) for request, answer in zip(requests, answers, strict=True)}
    engines.add_stock(lengths, ranks.local_rank, job.folder)
    engines.add_methods(stored_responses(engines.plain.engine, pool(prompts, subject.config, "bench replay")))
    rows: list[dict[str, Any]] = []
    for load in workloads(requests, answers, options.batches, options.repeats, options.max_tokens):
        rows += measure_load(engines, load)
        report(job, options, rows)
    engines.shutdown()
    leave()


def measure_load(engines: Engines, load: Workload) -> list[dict[str, Any]]:
    """Run all variants on a workload; return their rows, plain decoding's first."""
    started = time.monotonic()
    assert engines.stock is not None
    variants = [engines.plain, *engines.variants(load)]
    *measured, stock = measure([*variants, engines.stock], load)
    rows = [row_of(load, variant, found, measured[0], stock) for variant, found in zip(variants, measured, strict=True)]
    words = ", ".join(f"{row['method']} k={row['k']} {row['speedup']:.2f}x" for row in rows[1:])
    stock_rate = rows[0]["stock_tokens_per_s"]
    say(
        f"batch {load.name}: plain {rows[0]['tokens_per_s']:.0f} tokens/s, stock vLLM {stock_rate:.0f}; {words} "
        f"({time.monotonic() - started:.0f} s)"
    )
    return rows


def row_of(
    load: Workload, variant: Variant, found: Measurement, plain: Measurement, stock: Measurement
) -> dict[str, Any]:
    """Return the figures of a variant, with the ratios to plain decoding and to stock vLLM in the same rounds."""
    return {
        "method": variant.method,
        "k": variant.k,
        "batch": load.name,
        **compared(found, plain),
        "speedup_over_stock": ratios(found.rates, stock.rates).median,
        "stock_tokens_per_s": Spread.of(stock.rates).median,
        "decode_steps": found.stats.decode_steps,
        "responses": len(found.tokens),
        "responses_differing": differing(found, plain),
    }


def report(job: BenchJob, options: RolloutOptions, rows: list[dict[str, Any]]) -> None:
    """Write rows and page."""
    assert job.run_dir is not None
    fast = [row for row in rows if row["k"] != 0]
    wrong, total = sum(row["responses_differing"] for row in fast), sum(row["responses"] for row in fast)
    how = HOW.format(
        run=job.run_dir.name, repeats=options.repeats, max_tokens=options.max_tokens, wrong=wrong, total=total
    )
    write_rows(job.json_path, rows)
    write_page(
        job, "Speculative against plain rollouts", [how, table(rows, COLUMNS)], hardware(torch.get_num_threads())
    )
