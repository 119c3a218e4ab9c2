"""The entry point of the command `specrl`, in the one package whose name no user's module shares."""

import importlib
import sys
from pathlib import Path


def main() -> None:
    """Run this process's command line with specrl's own `flows`, `tasks` and `slurm`, whatever PYTHONPATH says."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    importlib.import_module("flows.cli").main()
