"""Content keys: a stage's key changes when, and only when, something that its result depends on changes.

The key names the stage's folder and, through it, its Slurm job, so that a restarted run finds finished stages and
running jobs.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specrl.artifacts import digest
from specrl.config import STAGES, Config, RewardPart, StageName
from specrl.data.formats.places import files_of

INPUTS: dict[StageName, tuple[StageName, ...]] = {
    "prepare": (),
    "pretrain": ("prepare",),
    "calibrate": ("prepare", "pretrain"),
    "train": ("prepare", "pretrain", "calibrate"),
    "validate": ("prepare", "pretrain", "train"),
    "export": ("prepare", "train", "validate"),
}
"""The finished stages that each stage reads."""

_ROLLOUTS = ("seed", "model", "data", "environment", "sampling", "speculation", "engine")
SECTIONS: dict[StageName, tuple[str, ...]] = {
    "prepare": ("seed", "model", "data", "environment", "warm_start", "policy", "sampling"),
    "pretrain": (*_ROLLOUTS, "drafter"),
    "calibrate": ("seed", "model", "policy", "precision"),
    "train": (*_ROLLOUTS, "bubbles", "refit", "policy", "drafter", "train", "precision"),
    "validate": (*_ROLLOUTS, "train", "precision", "validate"),
    "export": (*_ROLLOUTS, "precision", "drafter"),
}
"""The sections of the configuration that each stage reads itself. What its inputs read is in their keys."""

VALIDATION_OF_TRAINING = ("every", "sets", "correct_reward", "num_prompts")
"""The keys of `[validate]` that training reads, where it validates."""
END_BYTES = 2**20
"""The bytes read from each end of a file: safetensors begin with their header, and training changes all tensors."""
UNREAD = re.compile(r"\.|README|LICENSE|NOTICE|USE_POLICY", re.IGNORECASE)
"""The beginnings of the names of files in a model's folder that no stage reads."""
NO_STAGE_CODE = ("bench", "report", "projection", "checks")
"""Subpackages on which no stage's result depends: they only measure or show results."""


def stage_key(
    config: Config, named: dict[str, str], stage: StageName, inputs: dict[StageName, str], code: str, start: Any = None
) -> str:
    """`STAGE-` and 12 hex digits of the inputs' keys, the stage's sections, the files that these name, and the code.

    `named` are the configuration's `named_files`. `start` is what the stage starts from besides its inputs, such as the
    checkpoint of another stage.
    """
    assert set(inputs) == set(INPUTS[stage]), f"{stage} reads {INPUTS[stage]}, got keys of {tuple(inputs)}"
    files = {key: content for key, content in named.items() if reads(config, stage, key)}
    places = {*data_places(config), *_model_places(config)} & files.keys()  # the location of a file does not count
    settings = {key: value for key, value in flat_settings(config) if reads(config, stage, key) and key not in places}
    settings["first set"] = config.validate_.first_set if reads(config, stage, "validate.sets") else None
    return f"{stage}-{digest([stage, dict(inputs), settings, files, code, start])}"


def reads(config: Config, stage: StageName, key: str) -> bool:
    """Whether a stage's result depends on the setting itself; `source` matters to later stages only via `prepare`."""
    section, _, name = key.partition(".")
    if key in ("model.source", "drafter.source") or key.startswith("model.tiny"):
        return stage == "prepare" and (section == "model" or config.adopts_drafter)
    if stage == "train" and section == "validate":
        return bool(config.validate_.every) and name.partition(".")[0] in VALIDATION_OF_TRAINING
    return section in SECTIONS[stage]


def flat_settings(config: Config) -> list[tuple[str, Any]]:
    """Every setting with its key, such as `train.num_steps`, in the order of the sections."""
    return list(_flat(config.settings, ""))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def run_keys(config: Config, code: str, start: Any = None) -> dict[StageName, str]:
    """The keys of all stages; see `stage_key`. Each depends on the keys of its inputs and not on their results."""
    named, keys = named_files(config), dict[StageName, str]()
    for stage in STAGES:
        inputs = {name: keys[name] for name in INPUTS[stage]}
        keys[stage] = stage_key(config, named, stage, inputs, code, start if stage in ("prepare", "train") else None)
    return keys


def named_files(config: Config) -> dict[str, str]:
    """A digest of each of the user's files that the configuration names, by its key; it takes as long as to read them.

    They are data, sources of functions, and models in folders. Stages read them where they lie.
    """
    paths: dict[str, tuple[Path | None, ...]] = {**data_places(config)}
    paths |= {registry.key: (import_source(algorithm.name),) for registry, algorithm in config.algorithms}
    paths["data.reward"] = reward_sources(config.data.reward)
    paths["environment.name"] = (import_source(config.environment.name or ""),)
    for name, chosen in config.validate_.sets.items():
        paths[f"validate.sets.{name}.reward"] = reward_sources(chosen.reward)
    digests = {key: content for key, places in paths.items() if (content := _content(*places)) is not None}
    for key, source in _model_places(config).items():
        found = model_fingerprint(source)
        digests |= {key: digest(found)} if isinstance(found, list) else {}
    return digests


def _model_places(config: Config) -> dict[str, str]:
    models = {
        "model.source": config.model.source,
        "speculation.draft_model": config.speculation.draft_model,
        "drafter.source": config.drafter.source,
        "train.teacher": config.train.teacher,
    }
    return {key: str(source) for key, source in models.items() if source is not None}


def data_places(config: Config) -> dict[str, tuple[Path, ...]]:
    """The places of data that the configuration names, by their keys."""
    places = {
        "data.path": config.data.path,
        "data.validation_path": config.data.validation_path,
        "drafter.data": config.drafter.data,
        **{f"validate.sets.{name}.path": chosen.path for name, chosen in config.validate_.sets.items()},
    }
    return {key: named for key, named in places.items() if named is not None}


def code_digest(package: Path) -> str:
    """A digest of the relative paths and contents of those Python sources of `specrl` that stages import."""
    sources = ((path, path.relative_to(package)) for path in package.rglob("*.py"))
    return files_digest((path, str(name)) for path, name in sources if name.parts[0] not in NO_STAGE_CODE)


def files_digest(files: Iterable[tuple[Path, str]]) -> str:
    """A digest of the (path, name) pairs' names and contents, in any order."""
    return digest({name: file_digest(path) for path, name in files})


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's contents in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def import_source(name: str) -> Path | None:
    """The source file of a function given as `package.module:function`, or None.

    It is searched for in the current folder and then on `sys.path`, without importing it.
    """
    module, separator, _ = name.partition(":")
    if not separator:
        return None
    package, *rest = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd()), *sys.path])
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    folders = [Path(place, *rest) for place in spec.submodule_search_locations or []]
    found = (path for folder in folders for path in (folder / "__init__.py", folder.with_suffix(".py")))
    return next((path for path in found if path.is_file()), None)


def reward_sources(parts: Sequence[RewardPart] | None) -> tuple[Path | None, ...]:
    """The source file of each part of a reward; None for a registered function."""
    return tuple(import_source(part.name) for part in parts or ())


def _content(*places: Path | None) -> str | None:
    files = files_of([place for place in places if place is not None])
    return files_digest((path, str(number or "")) for number, path in enumerate(files)) if files else None


def model_fingerprint(source: str) -> Any:
    """The names, sizes and ends of the files in a model's folder, whose weights are too large to hash.

    Modification times do not count, because copying changes them, nor do files that nothing reads. A source that is
    not a folder is its own fingerprint.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return source
    entries = [entry for entry in os.scandir(folder) if entry.is_file() and not UNREAD.match(entry.name)]
    return sorted((entry.name, entry.stat().st_size, _ends(Path(entry.path))) for entry in entries)


def _ends(path: Path) -> str:
    with path.open("rb") as file:
        found = hashlib.sha256(file.read(END_BYTES))
        file.seek(max(0, path.stat().st_size - END_BYTES))
        found.update(file.read(END_BYTES))
    return found.hexdigest()[:12]
