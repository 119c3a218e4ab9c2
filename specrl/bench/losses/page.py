"""The page of `specrl bench losses`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch

from specrl.bench.job import BenchJob
from specrl.bench.losses.comparison import LossResult
from specrl.bench.pages import Page, heading
from specrl.bench.settings import LossSettings
from specrl.bench.tables import markdown_table, per_position, spread
from specrl.config import Config

HOW = """
Drafters of one shape ({layers} layers, draft vocabulary {vocabulary}), each trained in {epochs} epochs on the same
responses of the run's policy before RL ({prompts} prompts of the task x {samples}), from the same weights and in the
same order, once with each of {seeds} seeds, which are those of the responses, too. All take the same number of
optimizer steps; the seconds of the training are shown. The engine then drafts with each, k = {k}, at temperature
{temperature:g}: acceptance is that of its own counters on responses of natural length to {held_out} held-out prompts,
the same for every drafter, since no token depends on drafts. By position, it is the share of drafts that reach the
position whose token there is accepted. Speedups are matched pairs with plain decoding (median of {repeats}), which
drafters with `parallel=true` have in an engine of their own. Each cell is the mean over the seeds, with the least and
the greatest; the gain is the mean difference of the acceptance length to the first row, seed by seed.
"""


def write_page(
    job: BenchJob, settings: LossSettings, results: Sequence[LossResult], config: Config, seconds: float
) -> None:
    """Write the page.

    Args:
        config: The configuration that the drafters were compared with.
        seconds: The time that the benchmark took.
    """
    page, drafter = Page(job.page), config.drafter
    page.text(heading("losses of the drafter", job.command, torch.get_num_threads()))
    page.text(f"Run `{job.run_dir.name}`. The benchmark took {seconds / 60:.1f} minutes.")
    page.text(
        HOW.format(
            layers=drafter.num_layers,
            vocabulary=drafter.draft_vocab_size,
            epochs=settings.epochs or drafter.epochs,
            prompts=settings.num_prompts or drafter.num_prompts,
            samples=settings.samples_per_prompt or drafter.samples_per_prompt,
            seeds=len(settings.seeds),
            k=config.speculation.k,
            temperature=config.sampling.temperature,
            held_out=settings.num_held_out,
            repeats=settings.repeats,
        )
    )
    page.text(table(settings, results))
    page.write()


def table(settings: LossSettings, results: Sequence[LossResult]) -> str:
    """Return acceptance and speedups, with a row for each variant."""
    by_variant = {name: [result for result in results if result.variant == name] for name in settings.variants}
    first = by_variant[settings.variants[0]]
    speedups = [f">speedup at batch {batch}" for batch in settings.batches]
    columns = (
        "`[drafter]`",
        ">acceptance length",
        ">gain",
        ">acceptance by position",
        *speedups,
        ">training, s",
    )
    rows = []
    for name, own in by_variant.items():
        lengths = [result.stats.acceptance_length for result in own]
        gain = fmean(a - b.stats.acceptance_length for a, b in zip(lengths, first, strict=True))
        rates = zip(*(result.stats.acceptance_rate_per_pos for result in own), strict=False)
        speeds = [
            spread([result.pairs[index].speedup for result in own], ".2f") for index in range(len(settings.batches))
        ]
        seconds = spread([result.training_s for result in own], ".0f")
        positions = per_position([fmean(values) for values in rates])
        rows.append((f"`{name}`", spread(lengths, ".2f"), f"{gain:+.3f}", positions, *speeds, seconds))
    return markdown_table(columns, rows)
