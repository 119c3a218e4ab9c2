"""The code blocks of CONTRIBUTING.md, so that tests run what the page tells people to write.

A recipe is what stands under one `##` heading. A block belongs to a file if its first line is a comment that is
nothing but the file's name, such as `# my_loss.py`; other blocks are for reading or for other tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


@dataclass(frozen=True)
class Block:
    """One fenced block of code."""

    language: str
    """The word behind the opening fence, such as `python`, `toml` or `sh`."""
    file: str | None
    """The file that the block is the content of."""
    text: str
    """The code, its first line included."""


def blocks(heading: str) -> list[Block]:
    """Return the code blocks under the heading `## HEADING`, in their order.

    Raises:
        KeyError: the page has no such heading.
    """
    found = re.findall(r"^```(\w*)\n(.*?)^```$", _section(heading), re.DOTALL | re.MULTILINE)
    return [Block(language, _file(text), text) for language, text in found]


def write_files(heading: str, folder: Path) -> list[Path]:
    """Write the files of a recipe into `folder` and return their paths, in the order of the page."""
    paths = []
    for block in blocks(heading):
        if block.file is not None:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            paths.append(path)
    return paths


def _section(heading: str) -> str:
    sections = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(sections[1::2], sections[2::2], strict=True))[heading]


def _file(text: str) -> str | None:
    match = re.match(r"# ([\w./-]+\.\w+)\n", text)
    return match[1] if match else None
