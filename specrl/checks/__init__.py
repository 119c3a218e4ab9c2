"""Findings about a machine, printed by `specrl doctor` and checked by every GPU job in its first seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """A finding. With status `fail` nothing runs; with `warn` something does not run, or runs slowly."""

    name: str
    status: Status
    found: str  # what was found, in a few words
    fix: str = ""  # a command or advice, if any
