"""Check that no two packages of an environment own one path, and that torch is built for the CUDA version of the lock.

`python -m specrl.report.package_files` checks the environment it runs in, without importing any of it.
"""

from __future__ import annotations

import contextlib
import csv
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Sequence
from email import message_from_string
from importlib.metadata import Distribution, distributions
from pathlib import Path

NEVER_IMPORTED = {"build_backend.py"}  # flashinfer-python and torch-c-dlpack-ext ship the script that built them


def whole_packages(places: Sequence[str]) -> Iterator[tuple[str, str, Distribution]]:
    """The packages in some folders, with their names and versions.

    A pip that broke off leaves folders whose metadata are missing, cut short or no text: these are passed over.
    """
    for package in distributions(path=list(places)):
        with contextlib.suppress(ValueError):
            known = message_from_string(package.read_text("METADATA") or package.read_text("PKG-INFO") or "")
            if known["Name"] and known["Version"]:
                yield known["Name"], known["Version"], package


def collisions(site_packages: Path) -> dict[tuple[str, ...], list[str]]:
    """The paths that packages, such as `cuda-python 12.6.2`, own with different contents, by their RECORD files.

    The one installed last decides what runs. Equal copies do no harm: mlflow and mlflow-skinny share theirs.
    """
    hashes: dict[str, dict[str, str]] = defaultdict(dict)
    for name, version, package in whole_packages([str(site_packages)]):
        for path, content_hash, _ in csv.reader((package.read_text("RECORD") or "").splitlines()):
            if content_hash and path not in NEVER_IMPORTED:
                hashes[path][f"{name} {version}"] = content_hash
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path, owners in sorted(hashes.items()):
        if len(set(owners.values())) > 1:
            found[tuple(sorted(owners))].append(path)
    return found


def wrong_torch(site_packages: Path) -> str | None:
    """A line if torch's build is not for the CUDA version of `cuda-toolkit`."""
    installed = {name: package for name, _, package in whole_packages([str(site_packages)])}
    if "torch" not in installed or "cuda-toolkit" not in installed:
        return None
    wanted = ".".join(installed["cuda-toolkit"].version.split(".")[:2])
    source = Path(str(installed["torch"].locate_file("torch/version.py"))).read_text()
    found = re.search(r"^cuda\b.*= '([\d.]+)'", source, re.MULTILINE)
    if found and found[1] == wanted:
        return None
    build = f"CUDA {found[1]}" if found else "CPUs"
    return f"torch {installed['torch'].version} is built for {build}, not for CUDA {wanted}: make clean, then make env"


def problems(site_packages: Path) -> list[str]:
    """A line for torch's build and one for each set of packages that collide."""
    build = wrong_torch(site_packages)
    collided = [
        f"{' and '.join(owners)} own {len(shared)} paths with different contents, such as {', '.join(shared[:3])}: "
        "pin one of them differently in requirements/, then make lock"
        for owners, shared in collisions(site_packages).items()
    ]
    return [build, *collided] if build else collided


def main() -> None:
    found = problems(Path(sysconfig.get_path("purelib")))
    for problem in found:
        print(f"make env: {problem}", file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
