"""Tables for people: drawn by rich on a terminal, written as aligned plain lines when piped."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TextIO, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

Rows = Sequence[Sequence[str | Text]]


def print_table(title: str, columns: Sequence[str], rows: Rows, console: Console | None = None) -> None:
    """Print rows under their column names; a column whose name begins with `>` is aligned to the right."""
    console = console or Console()
    if console.is_terminal:
        console.print(drawn_table(title, columns, rows))
    else:
        print_line(plain_table(title, columns, rows), console)


def drawn_table(title: str, columns: Sequence[str], rows: Rows) -> Table:
    table = Table(title=Text(printable(title)), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        # `Text`, so that square brackets in a path are not parsed as markup.
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    return table


def plain_table(title: str, columns: Sequence[str], rows: Rows) -> str:
    names = [column.removeprefix(">") for column in columns]
    lines = [names, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    aligned = [
        "  ".join(
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([title, *(f"  {line}" for line in aligned)]) + "\n"


class _Lasting:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def lasting(stream: TextIO) -> TextIO:
    """Wrap a stream so that writing raises no error if its terminal is gone or its disk is full."""
    return cast(TextIO, _Lasting(stream))


def print_line(text: str, console: Console | None = None) -> None:
    """Print a line without wrapping, markup, colours or control characters, so that commands can be copied."""
    (console or Console()).print(printable(text), soft_wrap=True, markup=False, highlight=False)


def printable(text: str) -> str:
    """Escape the control characters of a text, except for line breaks."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )
