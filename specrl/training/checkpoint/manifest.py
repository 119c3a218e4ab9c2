"""The manifest of a checkpoint: the contents of its files, checksums, counters, and the scales of an FP8 KV cache.

It is written last, so that a folder with a manifest was once complete.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import safe_open
from torch import Tensor

from specrl.artifacts import is_passing, write_json
from specrl.distributed import Ranks
from specrl.precision.recipe import KvScales
from specrl.training.checkpoint.files import checksum_of
from specrl.training.pieces import REFERENCE, Piece, stored_name

MANIFEST_FILE = "manifest.json"
FORMAT = 5
WAITS = (5.0, 60.0, 240.0)
"""The seconds after which a file is read again if the file system fails in a way that passes."""

logger = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message says which one, why, and what to do."""


@dataclass(frozen=True)
class StoredFile:
    name: str
    size: int
    crc32: int
    pieces: tuple[Piece, ...] = ()
    """Its parts of the policy: a tensor for each kind and piece, named by `stored_name`."""


@dataclass(frozen=True)
class Manifest:
    step: int
    model: str
    """The shape of the policy in words; a policy of another shape cannot be restored from this checkpoint."""
    counters: Mapping[str, int]
    tensors: Mapping[str, Sequence[int]]
    """The shape of each tensor of the policy, by its Hugging Face name; all are float32."""
    files: tuple[StoredFile, ...]
    has_drafter: bool
    kv_scales: KvScales | None
    """None without an FP8 KV cache."""
    adapter_scale: float | None
    """The factor on the adapters' products, if the tensors are LoRA's."""


class StoredPolicy:
    """Reads the policy from a checkpoint's files by rectangles of its tensors, whatever the layout."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._held: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        self._files: dict[str, Any] = {}
        for file in manifest.files:
            for piece in file.pieces:
                self._held[piece.tensor].append((file.name, piece))

    def read(self, wanted: Piece, into: Mapping[str, Tensor]) -> None:
        """Fill matrices, by the names in `KINDS`, with the stored values of a rectangle."""
        missing = wanted.size
        for name, stored in self._held[wanted.tensor]:
            common = wanted.overlap(stored)
            if common is None:
                continue
            for kind, matrix in into.items():
                part = self.file(name).get_slice(stored_name(kind, stored))[common.inside(stored)]
                matrix[common.inside(wanted)].copy_(part)
            missing -= common.size
        assert not missing, f"{missing} elements of {wanted} are in no file of {self._folder}"

    @property
    def has_reference(self) -> bool:
        (name, piece), *_ = next(iter(self._held.values()))
        return stored_name(REFERENCE, piece) in set(self.file(name).keys())

    def file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._folder / name, framework="pt")
        return self._files[name]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, including its own checksum."""
    data = {"format": FORMAT, **TypeAdapter(Manifest).dump_python(manifest, mode="json")}
    write_json(folder / MANIFEST_FILE, {**data, "crc32": _checksum(data)})


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest; raise CheckpointError if it is missing, unreadable, damaged, or of another version."""
    path = folder / MANIFEST_FILE
    try:
        data = json.loads(_patiently(path.read_text))
        checksum = data.pop("crc32")
    except FileNotFoundError as error:
        raise CheckpointError(f"{MANIFEST_FILE} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{MANIFEST_FILE} cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} is damaged") from error
    if checksum != _checksum(data):
        raise CheckpointError(f"{MANIFEST_FILE} has the wrong checksum")
    if data.pop("format") != FORMAT:
        raise CheckpointError(f"{MANIFEST_FILE} was written by another version of specrl")
    return TypeAdapter(Manifest).validate_python(data)


def find_damage(folder: Path, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint's files, or None if all are as they were written (collective).

    Every byte is read once: the ranks divide the files among them.
    """
    found = _own_damage(folder, ranks)
    return next((text for text in ranks.gather(found) if text is not None), None)


def check_whole(folder: Path, ranks: Ranks) -> None:
    damage = find_damage(folder, ranks)
    if damage is not None:
        raise CheckpointError(f"checkpoint {folder} is damaged: {damage}; use an earlier one")


def _own_damage(folder: Path, ranks: Ranks) -> str | None:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    for file in manifest.files[ranks.rank :: ranks.world_size]:
        try:
            size, found = _patiently(partial(_measured, folder / file.name))
            if size != file.size:
                return f"{file.name} has {size} bytes instead of {file.size}"
            if found != file.crc32:
                return f"{file.name} has the wrong checksum {found:08x}"
        except FileNotFoundError:
            return f"{file.name} is missing"
        except OSError as error:  # a failing disk or file system
            return f"{file.name} cannot be read ({error.strerror or error})"
    return None


def _measured(path: Path) -> tuple[int, int]:
    return path.stat().st_size, checksum_of(path)


def _patiently[Found](read: Callable[[], Found]) -> Found:
    """Read again after a file server's failure: if a checkpoint counts as damaged, its last steps are run again."""
    for seconds in WAITS:
        try:
            return read()
        except OSError as error:
            if not is_passing(error):
                raise
            logger.warning("a checkpoint cannot be read (%s), and is read again in %.0f s", error, seconds)
            time.sleep(seconds)
    return read()


def _checksum(data: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True, default=str).encode())
