"""`specrl bench drafter`: measure, then write the rows and the page."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch

from specrl.bench.drafter.evaluation import Evaluation
from specrl.bench.drafter.initial import cells_of, make_drafters
from specrl.bench.job import BenchJob
from specrl.bench.options import DrafterOptions, RunOptions
from specrl.bench.pages import hardware, table, write_page, write_rows
from specrl.bench.run.main import train_cells
from specrl.distributed import join, leave

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
COLUMNS = {
    "drafter": "drafter",
    "kind": "kind",
    "k": "k",
    "temperature": "temperature",
    "batch": "batch",
    "tokens/s": "tokens_per_s",
    "speedup": "speedup",
    "over n-gram": "speedup_over_ngram",
    "acceptance length": "acceptance_length",
    "by position": "acceptance_rate_per_pos",
}


def main(job: BenchJob) -> None:
    """Measure drafters on a file of prompts, or those of a run over its RL steps; write rows and page."""
    options = DrafterOptions.load(job.options)
    ranks = join()
    if job.run_dir is None:
        evaluation = Evaluation(options, job.folder)
        evaluation.measure(partial(save, job, evaluation))
        evaluation.shutdown()
        leave()
        return
    subject = job.subject
    drafters = make_drafters(subject, options, ranks, job.folder / "initial")
    leave()
    train_cells(job, RunOptions(cells_of(drafters), options.steps, 1, 3, 0), subject)


def save(job: BenchJob, evaluation: Evaluation, rows: list[dict[str, Any]]) -> None:
    """Write rows and page."""
    options, counts = evaluation.options, Counter(question.category for question in evaluation.questions)
    how = HOW.format(
        policy=options.model,
        data=options.data,
        prompts=len(evaluation.questions),
        categories=", ".join(f"{name} {count}" for name, count in sorted(counts.items())),
        max_tokens=options.max_tokens,
        too_long=evaluation.too_long,
        repeats=options.repeats,
        equal=min(row["responses_equal"] for row in rows),
    )
    drafters = [
        {"drafter": one.name, "layers": one.layers, "loss": one.loss, "notes": list(one.notes)}
        for one in evaluation.candidates
    ]
    sections = [how, table(drafters, {name: name for name in drafters[0]}), table(rows, COLUMNS)]
    if len(counts) > 1:
        sections.append("## By category")
    for name in sorted(counts) if len(counts) > 1 else []:
        sections += [f"### {name}", table([{**row, **row["by_category"][name]} for row in rows], COLUMNS)]
    write_rows(job.json_path, rows)
    write_page(job, "Drafters on a file of prompts", sections, hardware(torch.get_num_threads()))
