"""The command `specrl` begins here, in the one package of which users have no module of the same name."""

import importlib
import sys
from pathlib import Path


def main() -> None:
    """Run the command line of this process, with our own `flows`, `tasks` and `slurm`, whatever lies on PYTHONPATH."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    importlib.import_module("flows.cli").main()
