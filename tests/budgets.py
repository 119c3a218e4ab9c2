"""`make check` runs this: no package is longer than its budget in `pyproject.toml`, and no folder too full."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("flows", "tasks", "slurm", "specrl")


def lines_of(package: str) -> int:
    """Count all lines of a package's modules, blank ones and comments included."""
    return sum(path.read_bytes().count(b"\n") for path in (ROOT / package).rglob("*.py"))


def problems(budget: dict[str, int], files: int, crowded: dict[str, int]) -> list[str]:
    """List the packages above their budget, and the folders with more modules than `files` or than `crowded` allows."""
    counts = {name: lines_of(name) for name in (*PRODUCT, *budget) if name != "all"}
    counts["all"] = sum(counts[name] for name in PRODUCT)
    found = [
        f"{name}: {counts[name]} lines, and its budget in pyproject.toml is {most}"
        for name, most in budget.items()
        if counts[name] > most
    ]
    for folder in sorted({path.parent for product in PRODUCT for path in (ROOT / product).rglob("*.py")}):
        name, number = str(folder.relative_to(ROOT)), len(list(folder.glob("*.py")))
        if number > crowded.get(name, files):
            found.append(f"{name}: {number} modules, and a folder may have {crowded.get(name, files)}")
    return found


def main() -> None:
    """Print what is above its budget, and exit with 1 if anything is."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["specrl"]["budget"]
    found = problems(settings["lines"], settings["files"], settings["crowded"])
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
