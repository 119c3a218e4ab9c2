"""`specrl bench rollouts`: measure, then write the rows and the page."""

from __future__ import annotations

import time
from typing import Any

from specrl.bench.job import BenchJob, say
from specrl.bench.options import RolloutOptions
from specrl.bench.pages import write_rows
from specrl.bench.rollouts.engines import Engines, stored_responses
from specrl.bench.rollouts.page import write_page
from specrl.bench.rollouts.rounds import TAIL_SIZE, Measurement, Variant, Workload, differing, measure
from specrl.bench.rollouts.workloads import pool, workloads
from specrl.bench.tables import Spread, ratios
from specrl.data.prompts import PromptSource
from specrl.distributed import join, leave
from specrl.models.sources import load_tokenizer


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
        write_rows(job.json_path, rows)
        write_page(job, options, rows)
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
    stats, speedup, over_stock = found.stats, ratios(found.rates, plain.rates), ratios(found.rates, stock.rates)
    return {
        "method": variant.method,
        "k": variant.k,
        "batch": load.name,
        "tokens_per_s": Spread.of(found.rates).median,
        "speedup": speedup.median,
        "speedup_min": speedup.least,
        "speedup_max": speedup.greatest,
        "speedup_over_stock": over_stock.median,
        "stock_tokens_per_s": Spread.of(stock.rates).median,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate_per_pos": list(stats.acceptance_rate_per_pos),
        "decode_steps": stats.decode_steps,
        "responses": len(found.tokens),
        "responses_differing": differing(found, plain),
    }
