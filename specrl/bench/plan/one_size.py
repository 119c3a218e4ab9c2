"""The process that measures one small run: `python -m specrl.bench.plan.one_size INDEX FOLDER PARENT`.

It is a process of its own, so that nothing of another run is in its memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from specrl.artifacts import write_json
from specrl.bench.plan.measure import measure
from specrl.bench.plan.sizes import SIZES
from specrl.processes import end_with_parent

RESULT = "measured.json"
"""The file in the folder that gets the result."""


def run(index: int, folder: Path, parent: int) -> None:
    """Measure one of `SIZES`, and end with the parent process.

    Args:
        folder: An empty folder.
        parent: The process id of the parent.
    """
    end_with_parent(parent)
    write_json(folder / RESULT, measure(SIZES[index], folder).as_json())


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
