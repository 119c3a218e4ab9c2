"""The page of `specrl bench drafter` about drafters on a file of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from specrl.bench.drafter.candidates import PLAIN
from specrl.bench.drafter.evaluation import Cell, Evaluation
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.tables import Spread, markdown_table, per_position
from specrl.report.plots import line_charts
from specrl.rollout.drafts.acceptance import SpeculationStats

HOW = """
Policy `{policy}`, {prompts} prompts of `{data}` ({categories}), each answered to its natural end or to {max_tokens}
tokens.{too_long} Every round runs every variant once on the same requests (same prompts, weights and seeds; the order
changes by round); a batch holds prompts of one category, some of them asked twice where there are too few. The speedup
of a round is the ratio of its tokens per second to those of plain decoding in that round, shown as the median of
{repeats} rounds with the least and the greatest; n-gram lookup takes part in the same rounds. Plain decoding is
specrl's engine without drafts. The acceptance length is 1 + accepted tokens per draft; rates by position are shares of
the drafts that reach it. Drafts have full length whether they pay or not.
"""
RangesOf = Callable[[Cell], Mapping[tuple[int, int], SpeculationStats]]
"""Cell -> its counters by the first and the last length of a range."""


def write_page(job: BenchJob, evaluation: Evaluation, cells: Sequence[Cell], seconds: float) -> None:
    """Write the page."""
    page = Page(job.page)
    page.text(heading("drafters on a file of prompts", job.command, torch.get_num_threads()))
    page.text(f"The benchmark took {seconds / 60:.1f} minutes.")
    page.text(HOW.format(**_how(evaluation)))
    page.text(drafter_table(evaluation))
    page.text("## Speedup and acceptance")
    page.plot("speedup", speedup_plot(cells), "speedup by batch size")
    page.text(cell_table(cells))
    page.text(equality(cells))
    drafting = [cell for cell in cells if cell.variant.k]
    if len(cells[0].categories) > 1:
        page.text("## By category")
        page.text(category_table(drafting))
    # A response depends neither on the batch nor on its drafts, so that one batch size says it all.
    first = [cell for cell in drafting if cell.batch == cells[0].batch]
    page.text("## By length")
    page.text("Acceptance length by the length of the response, in tokens:\n\n" + range_table(first, Cell.by_response))
    page.text("Acceptance length by the tokens before the draft:\n\n" + range_table(first, Cell.by_context))
    page.write()


def _how(evaluation: Evaluation) -> dict[str, object]:
    settings = evaluation.settings
    counts = Counter(question.category for question in evaluation.questions)
    dropped = f" {evaluation.too_long} rows with longer prompts were left out." if evaluation.too_long else ""
    return {
        "policy": settings.model,
        "data": settings.data,
        "prompts": len(evaluation.questions),
        "categories": ", ".join(f"{name} {count}" for name, count in sorted(counts.items())),
        "max_tokens": settings.max_tokens,
        "too_long": dropped,
        "repeats": settings.repeats,
    }


def drafter_table(evaluation: Evaluation) -> str:
    """Return what each drafter is."""
    rows = [
        (one.name, one.kind, str(one.layers), one.loss or "not said", "; ".join(one.notes) or "-")
        for one in evaluation.candidates
    ]
    return markdown_table(("drafter", "kind", ">layers", "trained with", "what was found"), rows)


def cell_table(cells: Sequence[Cell]) -> str:
    """Return speed and acceptance of every variant at every temperature and batch size."""
    speeds = (">tokens/s", ">speedup", ">range", ">over n-gram")
    columns = ("drafter", ">k", ">temperature", ">batch", *speeds, ">acceptance length", "by position")
    rows = []
    for cell in cells:
        ratio = cell.speedup
        rows.append(
            (
                *_names(cell),
                str(cell.batch),
                f"{cell.rate:.0f}",
                f"{ratio.median:.2f}",
                f"{ratio.least:.2f} - {ratio.greatest:.2f}",
                f"{cell.over_ngram.median:.2f}" if cell.variant.k else "-",
                f"{cell.stats.acceptance_length:.2f}",
                per_position(cell.stats.acceptance_rate_per_pos[:8]),
            )
        )
    return markdown_table(columns, rows)


def category_table(cells: Sequence[Cell]) -> str:
    """Return the acceptance length and the speedup of each category."""
    categories = cells[0].categories
    columns = ("drafter", ">k", ">temperature", ">batch", *(f">{name}" for name in categories))
    rows = []
    for cell in cells:
        values = [(cell.stats_of(name).acceptance_length, cell.speedup_of(name)) for name in categories]
        rows.append((*_names(cell), str(cell.batch), *(_pair(length, ratio) for length, ratio in values)))
    return "Acceptance length, and speedup over plain decoding:\n\n" + markdown_table(columns, rows)


def _pair(length: float, ratio: Spread) -> str:
    return f"{length:.2f}, {ratio.median:.2f}x"


def range_table(cells: Sequence[Cell], by: RangesOf) -> str:
    """Return the acceptance length by ranges of a length."""
    found = [by(cell) for cell in cells]
    ranges = sorted({ends for entry in found for ends in entry})
    columns = ("drafter", ">k", ">temperature", *(f">{first} - {last}" for first, last in ranges))
    rows = []
    for cell, entry in zip(cells, found, strict=True):
        shown = (f"{entry[ends].acceptance_length:.2f}" if ends in entry else "-" for ends in ranges)
        rows.append((*_names(cell), *shown))
    return markdown_table(columns, rows)


def _names(cell: Cell) -> tuple[str, str, str]:
    return cell.variant.candidate.name, str(cell.variant.k), f"{cell.temperature:g}"


def equality(cells: Sequence[Cell]) -> str:
    """Return in words how many responses are those of plain decoding."""
    least = min(cell.equal for cell in cells)
    if least == 1:
        return "All responses are those of plain decoding, token for token: all variants did the same work."
    return (
        f"At least {least:.1%} of the responses of each variant are those of plain decoding, token for token. Rounding "
        "depends on the batch shape, which can decide a BF16 near-tie differently, and all that follows. "
        "tests/exactness shows that nothing else changes a token."
    )


def speedup_plot(cells: Sequence[Cell]) -> str:
    """Draw the median speedup over the batch sizes, with a line for each drafter, k and temperature."""
    series: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        name, k, temperature = _names(cell)
        label = name if name == PLAIN else f"{name}, k = {k}"
        series.setdefault(f"{label}, temperature {temperature}", []).append((float(cell.batch), cell.speedup.median))
    return line_charts(series, "batch, requests (log scale)", "speedup over plain decoding", log_x=True)
