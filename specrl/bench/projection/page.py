"""The page of `specrl bench projection`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from specrl.bench.job import BenchJob
from specrl.bench.pages import Page
from specrl.bench.tables import markdown_table
from specrl.projection.simulator.choices import ACCEPTANCE, CHOICE_COLUMNS, Choice, assumptions, choice_cells
from specrl.projection.simulator.hardware import Efficiency
from specrl.projection.simulator.published import PublishedRow
from specrl.projection.simulator.step import StepModel
from specrl.report.plots import line_charts

AIM = 0.05
"""The largest relative error of a simulated speedup that counts as agreement."""

WHAT = """\
Nothing here was measured by specrl: every figure is simulated from the shapes of the models and the data sheets of the
GPUs (`specrl/projection/simulator`), with one set of assumptions for all rows. The published figures are those of
arXiv:2604.26779: measured for Qwen3-8B, projected by its authors for Qwen3-235B-A22B. The paper gives neither response
lengths nor layouts. They were chosen so that the step *without* speculation takes what was published; the constants of
the assumptions were then chosen once, for all rows together. Not simulated: whether the KV cache holds all running
responses, and attention in training. specrl's own runs on CPUs are simulated with costs that were measured in other
steps, by `specrl project RUN`: `2026-11-23-project-runs.md`."""
LAG = """\
The row with a lag of 2 steps is the one that misses. Its published speedups are those that the simulator finds without
a lag (3.49 and 2.62). With one, the simulator decodes the responses of two steps together, and divides the GPUs anew
for each way of generating. Then plain generation gains more from the lag than speculation does, whose larger batches
cost it more, and the trainer never has too few GPUs. The paper says neither how it divides the GPUs nor what its lag
overlaps."""
NOT_REPRODUCED = """\
Not reproduced, and not among the rows: the same paper measures that Qwen3-8B *loses* from k = 3 to k = 5 and 7 (RL-Zero
1.77, 1.44, 1.21), and that n-gram drafts reach 0.7 only. In the simulator every further verified position costs as much
as the first; in the measured engine it costs several times more beyond k = 3. specrl's controller measures that cost in
the run."""


@dataclass(frozen=True)
class ProjectedConfig:
    """A configuration and what was simulated of it."""

    name: str
    num_steps: int
    model: StepModel
    choices: Sequence[Choice]


def write_page(
    job: BenchJob,
    plain: Sequence[PublishedRow],
    published: Sequence[PublishedRow],
    projected: Sequence[ProjectedConfig],
) -> None:
    """Write the page."""
    page = Page(job.page)
    page.text(f"# {date.today().isoformat()}: steps on 8 to 2,048 GPUs, simulated\n\nCommand: `{job.command}`.")
    page.text(WHAT)
    within = sum(abs(row.error) <= AIM for row in published)
    page.text(f"## Published speedups\n\n{within} of {len(published)} simulated speedups are within {AIM:.0%}.")
    page.text(_table(published))
    page.text(LAG)
    page.text(NOT_REPRODUCED)
    page.text("Without speculation, by which lengths and the trainer's share of its peak were chosen:")
    page.text(_table(plain))
    page.text("Assumed in every row:\n\n" + "\n".join(f"- {line}" for line in Efficiency().lines()))
    for item in projected:
        _config(page, item)
    page.write()


def _table(rows: Sequence[PublishedRow]) -> str:
    cells = [
        (row.setting, row.quantity, f"{row.published:.2f}", f"{row.simulated:.2f}", f"{row.error:+.1%}") for row in rows
    ]
    return markdown_table(("setting", "quantity", ">published", ">simulated", ">error"), cells)


def _config(page: Page, item: ProjectedConfig) -> None:
    """Add the table and the chart of a configuration."""
    model = item.model
    page.text(f"## {item.name}: {model.gpus} {model.hardware.name}, engines of {model.engine_gpus}")
    rows = [choice_cells(choice, model.gpus, item.num_steps) for choice in item.choices]
    page.text(markdown_table(CHOICE_COLUMNS, rows))
    *lines, other = assumptions(model, ACCEPTANCE)
    lines = [*lines[:4], other]  # the others stand above, for all
    page.text("\n".join(f"- {line}" for line in lines))
    numbered = [choice for choice in item.choices if choice.name in ("plain", f"k = {choice.speculation.k}")]
    series = {
        "generation": [(choice.speculation.k, choice.generation_speedup) for choice in numbered],
        "step": [(choice.speculation.k, choice.step_speedup) for choice in numbered],
    }
    page.plot(item.name, line_charts(series, "drafts for each request, k", "speedup"), f"Speedup of {item.name} by k")
