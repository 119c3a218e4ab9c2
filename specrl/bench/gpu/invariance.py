"""The section `invariance` of `specrl bench gpu`, a process of its own: vLLM has these kernels in a whole process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from specrl.bench.gpu import exactness
from specrl.bench.gpu.models import Row, Scale


def measure(scale: Scale, folder: Path) -> Iterator[Row]:
    """Compare as in `exactness`, with `engine.batch_invariant = true`; CPUs have no such kernels, and no rows.

    Without near-ties, speculative responses equal plain ones token for token in this mode.
    """
    if torch.cuda.is_available():
        yield from exactness.measure(scale, folder / "invariance", batch_invariant=True)
