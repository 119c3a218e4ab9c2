"""One finding of `specrl doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding. `fail`: nothing runs without it; `warn`: something specific does not run, or runs slower."""

    name: str
    status: Status
    found: str
    mend: str = ""
    """A line to type, or what to do; empty when nothing is wrong."""
