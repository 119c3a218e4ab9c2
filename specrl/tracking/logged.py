"""How far earlier starts of a stage have logged, so that what is done again is not logged again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from specrl.artifacts import write_json


class LoggedSteps:
    """The last step that earlier starts of a stage have logged, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last = int(json.loads(path.read_text())["last"]) if path.exists() else -1  # -1 without any

    def extend(self, steps: Iterable[int]) -> None:
        """Note that these steps have been logged, before anything that shows it is removed."""
        last = max(steps, default=-1)
        if last > self.last:
            self.last = last
            write_json(self._path, {"last": last})
