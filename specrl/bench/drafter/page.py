"""The page of `specrl bench drafter`."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import torch

from specrl.bench.drafter.comparison import DrafterResult
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.settings import DrafterSettings
from specrl.bench.tables import markdown_table
from specrl.config import Config
from specrl.report.plots import line_charts

HOW = """
One RL run of {num_steps} steps ({prompts_per_step} prompts x {samples} responses, the run's own policy before RL, task
and learning rate) with {count} drafters beside it. Rollouts do not depend on the drafter, so that all are judged on
the same responses: before a drafter is trained on a step's responses, they are compared with its drafts, which it makes
from the features of the policy version that sampled them. "Task" was pretrained on the policy's responses to
{num_prompts} prompts of the task; "off-task" on its responses to as many generic instructions (chat-like text made from
templates, `specrl/bench/drafter/instructions.py`: no public chat data){both}, each with a draft vocabulary of its own
from those responses, {epochs} epochs. "Online" is trained on every step's features at learning rate {online_lr:g};
"frozen" is not trained.{stale}
k = {k}. Speedups are matched pairs on held-out prompts under the last policy (median of {repeats}).
"""
STALE = """ "One step behind" always has the weights that "online" had a step earlier, as where a refit of the drafter
is lost; the weights of "zeroed" are all zero, as where a sleep has lost them."""
SHOWN = 3
"""The number of first steps, and of last steps, over which acceptance lengths are averaged."""


@dataclass(frozen=True)
class DrafterFindings:
    """The findings that the page shows."""

    results: list[DrafterResult]
    counted: list[float]
    """The acceptance length of each step as the engine counted it with the last drafter."""
    config: Config
    seconds: float


def write_page(job: BenchJob, settings: DrafterSettings, found: DrafterFindings) -> None:
    """Write the page."""
    page = Page(job.page)
    page.text(heading("drafter initialisation and online adaptation", job.command, torch.get_num_threads()))
    page.text(f"Run `{job.run_dir.name}`. The benchmark took {found.seconds / 60:.1f} minutes.")
    drafter = found.config.drafter
    page.text(
        HOW.format(
            **settings.model_dump(exclude={"samples_per_prompt", "batches", "stale"}),
            both='; "both" on half as many of each' if "both" in settings.sources else "",
            count=len(found.results),
            stale=STALE if settings.stale else "",
            samples=settings.samples_per_prompt,
            online_lr=drafter.online_lr,
            k=drafter.ttt_steps,
        )
    )
    series = {
        result.drafter.name: [(float(step), length) for step, length in enumerate(result.drafter.lengths)]
        for result in found.results
    }
    page.text(table(found.results))
    page.plot("acceptance", line_charts(series, "RL step", "acceptance length, tokens"), "acceptance length by RL step")
    last = found.results[-1].drafter
    page.text(
        f'The engine itself drafted with "{last.name}" and counted {fmean(found.counted):.2f} on average over the '
        f"steps, against {fmean(last.lengths):.2f} by replaying the stored responses through the trainer."
    )
    page.write()


def table(results: list[DrafterResult]) -> str:
    """Return acceptance lengths and speedups, with a row for each drafter."""
    batches = [pair.batch for pair in results[0].pairs]
    speedups = [f">speedup at batch {batch}" for batch in batches]
    columns = ("pretrained on", "in RL", ">acceptance length, first steps", ">last steps", *speedups)
    rows = []
    for result in results:
        lengths = result.drafter.lengths
        speedups = [f"{pair.speedup:.2f} ({pair.speedup_min:.2f} - {pair.speedup_max:.2f})" for pair in result.pairs]
        first, last = fmean(lengths[:SHOWN]), fmean(lengths[-SHOWN:])
        rows.append((result.drafter.source, result.drafter.training, f"{first:.2f}", f"{last:.2f}", *speedups))
    return f"Acceptance lengths are means of the first and last {SHOWN} steps:\n\n" + markdown_table(columns, rows)
