"""The draft methods of CONTRIBUTING.md, as rows of the table for as long as a test needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specrl.config.methods import METHODS, DraftMethod
from tests.contributing import blocks, write_files

HEADING = "A draft source"


@contextmanager
def recipe(folder: Path) -> Iterator[dict[str, DraftMethod]]:
    """Write the page's files into `folder`, make them importable, and add its rows to the table."""
    write_files(HEADING, folder)
    code = [block.text for block in blocks(HEADING) if block.language == "python" and block.file is None]
    rows = [eval(text, {"DraftMethod": DraftMethod}) for text in code]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for row in rows:
            patch.setitem(METHODS, row.name, row)
        yield {row.name: row for row in rows}
