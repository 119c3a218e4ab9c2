"""Which packages are missing, found without importing anything."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence


def missing(imports: Sequence[str]) -> list[str]:
    """Return those of the modules that are not installed."""
    return [name for name in imports if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around a module is missing
        return False
