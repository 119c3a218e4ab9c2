"""The sections of `specrl bench gpu`, and the process that runs one of them.

`python -m specrl.bench.gpu.sections FOLDER NAME SCALE PARENT`: each section has a process of its own, so that an error
in one of them, of whatever kind, loses no other.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

from specrl.bench.gpu.findings import Record
from specrl.bench.settings import GPU_SECTIONS
from specrl.processes import end_with_parent


@dataclass(frozen=True)
class Section:
    """A part of the benchmark."""

    name: str
    """Its name, which is also that of its module, whose function `measure` is called."""
    title: str
    minutes: float
    """The longest it may take on a GPU."""
    imports: tuple[str, ...] = ()
    """The packages that it needs besides torch."""
    needs_gpu: bool = False
    """Whether nothing of it can be done without a GPU."""


SECTIONS = (
    Section("environment", "Environment", 2, ("transformers",)),
    Section("fp8", "Native FP8 against the emulation", 3, ("transformers",)),
    Section("exactness", "Token-for-token exactness", 10, ("transformers", "vllm")),
    Section("sleep", "Sleep, wake and refit", 4, ("transformers", "vllm"), needs_gpu=True),
    Section("training", "Policy update: throughput and memory", 6, ("transformers", "megatron.core")),
    Section("speculation", "Generation: vLLM as it comes against speculation", 15, ("transformers", "vllm")),
)
"""All sections, in the order in which they run: the short ones first."""
assert tuple(section.name for section in SECTIONS) == GPU_SECTIONS


def run_section(folder: Path, name: str, scale_name: str) -> None:
    """Run one section in this process, and write its record."""
    from specrl.bench.gpu.models import FULL, TINY

    scale = FULL if scale_name == FULL.name else TINY
    findings = importlib.import_module(f"specrl.bench.gpu.{name}").measure(scale, folder)
    Record(name, "done", findings=findings).save(folder)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[4]))
    run_section(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
