"""The type of a finding of `specrl doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding: with `fail` nothing runs; with `warn` something does not run, or runs slower."""

    name: str
    status: Status
    found: str
    """What is there, in a few words."""
    fix: str = ""
    """A line to type, or what to do. Empty when nothing is wrong."""
