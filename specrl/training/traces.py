"""Traces of whole steps, with their operators, kernels and parts, for Perfetto (https://ui.perfetto.dev)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile

logger = logging.getLogger(__name__)


@contextmanager
def traced(step: int, steps: Sequence[int], folder: Path, rank: int) -> Iterator[None]:
    """Write a trace of the block, `step=NNNNNN-rank=NNNNN.json.gz`, to a folder if `step` is one of `steps`."""
    if step not in steps:
        yield
        return
    with profile() as profiler:
        yield
    path = folder / f"step={step:06d}-rank={rank:05d}.json.gz"
    try:
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
    except OSError as error:
        logger.warning("no trace of step %d: %s", step, error)
