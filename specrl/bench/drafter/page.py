"""The page of `specrl bench drafter` about drafters on a file of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specrl.bench.drafter.evaluation import Evaluation
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.tables import markdown_table, per_position

HOW = """
Policy `{policy}`, {prompts} prompts of `{data}` ({categories}), each answered to its natural end or to {max_tokens}
tokens; {too_long} rows with longer prompts were left out. Every round runs every variant once on the same requests
(same prompts, weights and seeds; the order changes by round); a batch holds prompts of one category, some of them asked
twice where there are too few. The speedup of a round is the ratio of its tokens per second to those of plain decoding
in that round, shown as the median of {repeats} rounds with the least and the greatest; n-gram lookup takes part in the
same rounds. Plain decoding is specrl's engine without drafts. The acceptance length is 1 + accepted tokens per draft;
rates by position are shares of the drafts that reach it. Drafts have full length whether they pay or not. At least
{equal:.1%} of the responses of each variant are those of plain decoding, token for token; near-ties aside, which
rounding decides, nothing else may change a token.
"""
Rows = Sequence[Mapping[str, Any]]


def write_page(job: BenchJob, evaluation: Evaluation, rows: Rows) -> None:
    """Write the page."""
    options, counts = evaluation.options, Counter(question.category for question in evaluation.questions)
    page = Page(job.page)
    page.text(heading("Drafters on a file of prompts", job.command, torch.get_num_threads()))
    page.text(
        HOW.format(
            policy=options.model,
            data=options.data,
            prompts=len(evaluation.questions),
            categories=", ".join(f"{name} {count}" for name, count in sorted(counts.items())),
            max_tokens=options.max_tokens,
            too_long=evaluation.too_long,
            repeats=options.repeats,
            equal=min(row["responses_equal"] for row in rows),
        )
    )
    kinds = [
        (one.name, one.kind, str(one.layers), one.loss or "not said", "; ".join(one.notes) or "-")
        for one in evaluation.candidates
    ]
    page.text(markdown_table(("drafter", "kind", ">layers", "trained with", "what was found"), kinds))
    page.text("## Speedup and acceptance\n\n" + table(rows))
    if len(counts) > 1:
        page.text("## By category\n\nAcceptance length, and speedup over plain decoding:\n\n" + category_table(rows))
    page.write()


def table(rows: Rows) -> str:
    """Show speed and acceptance of every variant at every temperature and batch size."""
    lines = [
        (
            *_names(row),
            f"{row['tokens_per_s']:.0f}",
            f"{row['speedup']:.2f} ({row['speedup_min']:.2f} to {row['speedup_max']:.2f})",
            f"{row['speedup_over_ngram']:.2f}" if row["k"] else "-",
            f"{row['acceptance_length']:.2f}",
            per_position(row["acceptance_rate_per_pos"][:8]),
        )
        for row in rows
    ]
    columns = (">tokens/s", ">speedup", ">over n-gram", ">acceptance length", "by position")
    return markdown_table(("drafter", ">k", ">temperature", ">batch", *columns), lines)


def category_table(rows: Rows) -> str:
    """Show the acceptance length and the speedup of each category."""
    categories = list(rows[0]["by_category"])
    lines = []
    for row in (row for row in rows if row["k"]):
        found = [row["by_category"][name] for name in categories]
        lines.append((*_names(row), *(f"{one['acceptance_length']:.2f}, {one['speedup']:.2f}x" for one in found)))
    return markdown_table(("drafter", ">k", ">temperature", ">batch", *(f">{name}" for name in categories)), lines)


def _names(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return row["drafter"], str(row["k"]), f"{row['temperature']:g}", str(row["batch"])
