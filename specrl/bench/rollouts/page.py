"""The page of `specrl bench rollouts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specrl.bench.job import BenchJob
from specrl.bench.options import TAIL, RolloutOptions
from specrl.bench.pages import Page, heading
from specrl.bench.tables import markdown_table, per_position
from specrl.report.plots import line_charts

HOW = """
Run `{run}`. Every round runs every variant once on the same requests (same prompts, weights and seeds; the order
changes by round). The speedup of a round is the ratio of its tokens per second to those of plain decoding in that
round, shown as the median of {repeats} rounds with the least and the greatest. Plain decoding has an engine of its own
without a drafter. *over stock* is the ratio to stock vLLM, in a process of its own: its own sampler, scheduler and
limits, asynchronous scheduling and CUDA graphs where there is a GPU, and as many tokens after each prompt; in the row
of plain decoding this is the ratio of the two baselines. At a fixed batch size the requests are held-out prompts whose
responses have at least {max_tokens} tokens and are cut there, so that the batch keeps its size; each round has other
prompts, and below batch 8 there are eight of them, one batch after another. `tail64` is 64 held-out prompts on one
rank, each to its natural end. Prefill is part of the time. k is the longest draft; `adaptive` leaves it to the engine,
after uncounted runs in which it learned its times. Replay has one stored response per prompt, sampled from the same
policy with other seeds.
"""
Rows = Sequence[Mapping[str, Any]]


def write_page(job: BenchJob, options: RolloutOptions, rows: Rows) -> None:
    """Write the page."""
    assert job.run_dir is not None
    page = Page(job.page)
    page.text(heading("Speculative against plain rollouts", job.command, torch.get_num_threads()))
    page.text(HOW.format(run=job.run_dir.name, repeats=options.repeats, max_tokens=options.max_tokens))
    if any(row["batch"] != TAIL for row in rows):
        page.plot("speedup", speedup_plot(rows), "speedup by batch size")
    page.text(table(rows))
    page.text(equality(rows))
    page.write()


def table(rows: Rows) -> str:
    """Show speed and acceptance of every variant on every workload."""
    speeds = (">tokens/s", ">speedup", ">range", ">over stock")
    columns = ("batch", "method", "k", *speeds, ">acceptance length", "by position", ">steps")
    lines = [
        (
            str(row["batch"]),
            "plain" if row["k"] == 0 else row["method"],
            str(row["k"]),
            f"{row['tokens_per_s']:.0f}",
            f"{row['speedup']:.2f}",
            f"{row['speedup_min']:.2f} - {row['speedup_max']:.2f}",
            f"{row['speedup_over_stock']:.2f}",
            f"{row['acceptance_length']:.2f}",
            per_position(row["acceptance_rate_per_pos"][:8]),
            str(row["decode_steps"]),
        )
        for row in rows
    ]
    return markdown_table(columns, lines)


def equality(rows: Rows) -> str:
    """Say how many responses differ from those of plain decoding, and why."""
    fast = [row for row in rows if row["k"] != 0]
    wrong, total = sum(row["responses_differing"] for row in fast), sum(row["responses"] for row in fast)
    text = f"{wrong} of {total} speculative responses differ from those of plain decoding in the same round"
    if not wrong:
        return f"{text}: the two sides did the same work."
    return (
        f"{text}: rounding depends on the batch shape, which can decide a near-tie differently. tests/exactness shows "
        "that nothing else changes a token."
    )


def speedup_plot(rows: Rows) -> str:
    """Draw the median speedup over the fixed batch sizes, with a line for each method and k."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["batch"] != TAIL:
            name = "plain" if row["k"] == 0 else f"{row['method']}, k = {row['k']}"
            series.setdefault(name, []).append((float(row["batch"]), row["speedup"]))
    return line_charts(series, "running batch, requests (log scale)", "speedup over plain decoding", log_x=True)
