"""The dated page of `specrl bench gpu`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specrl.bench.gpu.findings import Record
from specrl.bench.gpu.models import Scale
from specrl.bench.gpu.sections import SECTIONS
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.tables import markdown_table


def write_page(job: BenchJob, records: Sequence[Record], scale: Scale) -> None:
    """Write the page of the sections that have been run so far."""
    titles = {section.name: section.title for section in SECTIONS}
    page = Page(job.page)
    where = "a GPU" if torch.cuda.is_available() else "a CPU, where parts that need a GPU are marked and not measured"
    page.text(heading(f"a first look at {where}", job.command, torch.get_num_threads()))
    page.text(f"Sizes: {scale.name}. All models are random. Every section ran in a process of its own.")
    rows = [(titles[record.section], record.status, f"{record.seconds:.0f}", record.error) for record in records]
    page.text(markdown_table(("section", "result", ">seconds", ""), rows))
    for record in records:
        page.text(f"## {titles[record.section]}")
        if record.error:
            page.text(f"**{record.status}**: {record.error}")
        for paragraph in record.findings.text:
            page.text(paragraph)
        for table in record.findings.tables:
            page.text(f"{table.title}:\n\n{markdown_table(table.columns, table.rows)}")
    page.write()
