"""`python -m specrl.bench.gpu`: `specrl bench gpu` for a machine with torch that lacks packages of the command line.

It says which packages are missing, and measures what can be measured without them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specrl.bench.gpu.imports import missing

REQUIRED = ("torch", "transformers", "safetensors", "tokenizers", "pydantic", "filelock", "psutil", "rich", "numpy")
"""The packages without which no section runs."""


def main() -> None:
    """Run the benchmark with the defaults of its settings.

    Raises:
        SystemExit: A package is missing without which nothing can be measured, or a section failed.
    """
    parser = argparse.ArgumentParser(prog="python -m specrl.bench.gpu", description=__doc__)
    parser.add_argument("--sections", default="", help="sections separated by commas; all of them by default")
    parser.add_argument("--tiny", action="store_true", help="take tiny models on a GPU, too")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier calls have measured")
    parser.add_argument("--minutes", type=int, default=40, help="the longest time of all sections together")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-gpu"), help="where results and logs lie")
    parser.add_argument("--page", type=Path, default=None, help="the page; benchmarks/DATE-gpu.md by default")
    given = parser.parse_args()
    if absent := missing(REQUIRED):
        sys.exit(f"not installed, and needed by every section: {', '.join(absent)}; pip install them, or carry wheels")
    run(given)


def run(given: argparse.Namespace) -> None:
    """Run the benchmark on a machine that has what every section needs."""
    from specrl.bench.gpu.main import main as measure
    from specrl.bench.job import BenchJob
    from specrl.bench.pages import default_page

    sections = [name for name in given.sections.split(",") if name]
    settings = {"sections": sections, "tiny": given.tiny, "fresh": given.fresh, "minutes": given.minutes}
    page = given.page or default_page("gpu")
    folder = given.folder.absolute()
    command = " ".join(["python -m specrl.bench.gpu", *sys.argv[1:]])
    measure(BenchJob("", folder, settings, command, page.absolute(), folder / "gpu-rows.json"))
    print(f"page: {page}")


if __name__ == "__main__":
    main()
