"""The page of `specrl bench faults`."""

from __future__ import annotations

from collections.abc import Mapping

from specrl.bench.faults.catalogue import CONTROL, Fault
from specrl.bench.faults.one_run import HEALTHY_STEPS, Finding
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.settings import FaultSettings
from specrl.bench.tables import markdown_table
from specrl.config import Config

WHAT = """\
Each fault is a failure that others report as silent, or that only specrl's own invariants make a failure. It is
injected into a training of its own where it was reported: into what a refit sends, into what the engine holds after it,
into its sampler, or into the trainer's drafter. The table has what a rank says of it first, as an error that ends the
job or as an event of the run. A fault of the drafter never changes a token, and the run goes on with the last good
drafter. If no step says anything, the test of exactness of the stage `validate` is run on the damaged engine."""


def write_page(job: BenchJob, settings: FaultSettings, config: Config, found: Mapping[Fault, Finding]) -> None:
    """Write the page."""
    page = Page(job.page)
    page.text(heading("silent failures, injected", job.command, settings.threads))
    page.text(WHAT)
    faults = {fault: finding for fault, finding in found.items() if fault.name != CONTROL}
    noticed = sum(finding.noticed for finding in faults.values())
    page.text(
        f"{noticed} of {len(faults)} faults were noticed. Run {config.name}, one rank; {HEALTHY_STEPS} step without "
        f"the fault, then up to {settings.num_steps} with it, of {settings.prompts_per_step} prompts with "
        f"{settings.samples_per_prompt} responses."
    )
    rows = [
        (
            fault.name,
            fault.reported or "-",
            finding.where or ("-" if fault.name == CONTROL else "**unnoticed**"),
            str(finding.after_steps),
            finding.message.replace("|", "\\|").replace(f"{job.folder}/", ""),
        )
        for fault, finding in found.items()
    ]
    columns = ("fault", "reported by others", "noticed in", ">complete steps with it", "what was said")
    page.text(markdown_table(columns, rows))
    page.write()
