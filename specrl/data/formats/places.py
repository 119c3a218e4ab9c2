"""Finds the files that settings such as `data.path` name, and fetches data sets of the Hugging Face hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from pathlib import Path

from specrl.artifacts import atomic_path
from specrl.config import ConfigError

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")  # before `.gz`
HUB = re.compile(r"hub:(?P<name>[^@:#]+)(?:@(?P<revision>[^:#]+))?(?::(?P<subset>[^#]+))?(?:#(?P<split>.+))?")
"""A data set of the hub: `hub:OWNER/NAME`, optionally with `@REVISION`, `:SUBSET` and `#SPLIT`."""
HUB_FOLDER = ".datasets"
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")  # files beside the data in a data set of the hub
SPLIT = re.compile(r"(?:(train)(?:ing)?|test|valid(?:ation)?|val|dev|eval)(?![a-z])")  # how a name begins


def files_of(places: Iterable[Path]) -> list[Path]:
    """List the data files of places, each a file, a folder with everything below it, or a pattern such as `*.jsonl`.

    Folders and patterns yield files in the order of their names, without hidden ones.

    Raises:
        ConfigError: A folder also has files that must not be trained on, such as `test.parquet` beside
            `train.parquet`, or was saved by the library `datasets` in its own format.
    """
    found: list[Path] = []
    for place in places:
        if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
            raise ConfigError(f"{place} was written by save_to_disk: write a split as Parquet, by its to_parquet(FILE)")
        if place.is_dir():
            below = (path for path in place.rglob("*") if "/." not in f"/{path.relative_to(place)}")
            data = sorted(path for path in below if suffix_of(path) in SUFFIXES and path.is_file())
            for folder, splits in _splits(place, data).items():
                if "train" in splits and len(splits) > 1:
                    raise ConfigError(
                        f"{folder} has files of several splits ({', '.join(sorted(splits))}): name the files of one: "
                        "its folder, such as FOLDER/train, or a pattern, such as FOLDER/train*"
                    )
            found += [path for path in data if path.name not in DESCRIPTIONS]
        elif place.is_file():
            found.append(place)
        elif glob.has_magic(str(place)):
            names = glob.glob(str(place), recursive=True)  # noqa: PTH207 - of a path that may be absolute
            found += sorted(path for path in map(Path, names) if path.is_file())
    return found


def _splits(place: Path, files: Iterable[Path]) -> dict[Path, set[str]]:
    found: dict[Path, set[str]] = {}
    for path in files:
        parts = path.relative_to(place).parts
        for depth, part in enumerate(parts):
            if match := SPLIT.match(part.lower()):
                found.setdefault(place.joinpath(*parts[:depth]), set()).add(match[1] or match[0])
                break  # the topmost name counts: `train/unit-test.jsonl` is training data
    return found


def suffix_of(path: Path) -> str:
    """The suffix of a file's name, without that of its compression."""
    return Path(path.name.removesuffix(".gz")).suffix


def absolute_place(place: Path, runs_dir: Path) -> Path:
    """Make a place's path absolute; a data set of the hub is fetched once into a file beside the runs.

    It is fetched by this process, because compute nodes may have no network.
    """
    if not str(place).startswith("hub:"):
        return place.absolute()
    named = HUB.fullmatch(str(place))
    if named is None:
        raise ConfigError(f"{place}: a data set of the hub is hub:OWNER/NAME, hub:OWNER/NAME:SUBSET or either #SPLIT")
    path = runs_dir.absolute() / HUB_FOLDER / (re.sub(r"[^\w.-]+", "--", str(place)[4:].strip("/")) + ".parquet")
    if not path.exists():
        _fetch(named, path)
    return path


def _fetch(named: re.Match[str], path: Path) -> None:
    import datasets  # takes seconds to import
    from requests import RequestException

    split = named["split"] or "train"
    try:
        found = datasets.load_dataset(named["name"], named["subset"], split=split, revision=named["revision"])
    except (OSError, ValueError, RuntimeError, RequestException) as error:  # not found, or no hub
        raise ConfigError(f"{named[0]} cannot be fetched: {' '.join(str(error).split())[:300]}") from error
    with atomic_path(path) as temporary:
        found.to_parquet(str(temporary))
