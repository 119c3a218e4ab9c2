"""What a section of `specrl bench gpu` found, as it lies on disk between the sections and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from specrl.artifacts import write_json

NEEDS_GPU: Literal["needs a GPU"] = "needs a GPU"
"""What stands in a table where only a GPU could give a figure."""
Status = Literal["done", "failed", "missing", "needs a GPU"]


@dataclass
class Table:
    """A table of the page; a column whose name begins with `>` is aligned to the right."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Add a row."""
        assert len(cells) == len(self.columns), (self.columns, cells)
        self.rows.append([str(cell) for cell in cells])


@dataclass
class Findings:
    """The paragraphs and tables of a section, and its figures for programs."""

    text: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def table(self, title: str, columns: Sequence[str]) -> Table:
        """Add an empty table, and return it."""
        self.tables.append(Table(title, list(columns)))
        return self.tables[-1]


@dataclass
class Record:
    """How a section ended, and what it found."""

    section: str
    status: Status
    seconds: float = 0.0
    error: str = ""
    """Why there are no findings; empty if the section is done."""
    findings: Findings = field(default_factory=Findings)

    def save(self, folder: Path) -> None:
        """Write the record as FOLDER/SECTION.json."""
        write_json(folder / f"{self.section}.json", asdict(self))

    @classmethod
    def load(cls, folder: Path, section: str) -> Record | None:
        """Return the record of a section; None if there is none."""
        path = folder / f"{section}.json"
        if not path.is_file():
            return None
        data = json.loads(path.read_text())
        found = data.pop("findings")
        tables = [Table(**table) for table in found["tables"]]
        return cls(**data, findings=Findings(found["text"], tables, found["figures"]))
