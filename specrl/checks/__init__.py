"""Findings about a machine, which `specrl doctor` prints and every job with GPUs makes in its first seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """A finding. With the status `fail` nothing runs; with `warn` something does not run, or runs slowly."""

    name: str
    status: Status
    found: str  # the state of the machine, in a few words
    fix: str = ""  # a command, or what to do, if anything
