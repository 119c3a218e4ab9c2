"""The reader and the writer of the safetensors files in Hugging Face directories."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specrl.artifacts import atomic_path, write_json
from specrl.models.directory import (
    CONFIG_FILE,
    COPIED_SUFFIXES,
    INDEX_FILE,
    WEIGHTS_FILE,
    read_model_config,
    weight_files,
)
from specrl.models.families import family_of

FILE_BYTES = 4 * 2**30  # the largest file written, unless a single tensor is larger
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how the library reports a file-system error


class TensorReader:
    """Reads tensors, whole or in part, from the safetensors files of a Hugging Face directory, mapped into memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}  # the open file of each tensor
        for name in weight_files(directory):
            if not (directory / name).is_file():
                raise ValueError(f"no weights in {directory}: {name} is missing")
            file: Any = safe_open(directory / name, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading the tensor."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU, in the type it has on disk."""
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def read_slice(self, name: str, start: int, stop: int, *, dim: int = 0) -> Tensor:
        """The part of a tensor from `start` up to `stop` along dimension `dim`, 0 or 1."""
        view = self._file(name).get_slice(name)
        part: Tensor = view[:, start:stop] if dim else view[start:stop]
        return part

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every name with its tensor, reading one tensor at a time."""
        for name in self._files:
            yield name, self.read(name)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise ValueError(f"{self._directory} has no tensor {name!r}, which a model of its {CONFIG_FILE} has")
        return self._files[name]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, of any device and strides, as a safetensors file, under a temporary name until complete."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_path(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            save_file(on_cpu, os.fspath(temporary), metadata={"format": "pt"})
        except SafetensorError as error:
            if (number := OS_ERROR.search(str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        temporary.chmod(mode)


def write_model(
    directory: Path, source: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, writes: bool
) -> None:
    """Write a Hugging Face directory with the weights in `tensors`, and tokenizer and configuration of `source`.

    A tensor is copied before the next one is requested. Ranks that do not write only exhaust the iterator, which may be
    collective. `config.json` is written last, so that a directory with one is complete.
    """
    if not writes:
        for _ in tensors:
            pass
        return
    parts = list(_write_parts(directory, tensors))
    final = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    if len(parts) == 1:
        final = [WEIGHTS_FILE]
    for number, name in enumerate(final):
        _part(directory, number).replace(directory / name)
    if len(parts) > 1:
        files = {name: file for names, file in zip(parts, final, strict=True) for name in names}
        write_json(directory / INDEX_FILE, {"metadata": {}, "weight_map": files})
    _copy_rest(directory, source, dtype)


def _write_parts(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[str]]:
    held: dict[str, Tensor] = {}
    size = number = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if held and size + nbytes > FILE_BYTES:
            write_tensors(_part(directory, number), held)
            yield list(held)
            held, size, number = {}, 0, number + 1
        held[name] = tensor.to("cpu", copy=True).contiguous()
        size += nbytes
    write_tensors(_part(directory, number), held)
    yield list(held)


def _part(directory: Path, number: int) -> Path:
    return directory / f"part-{number}.safetensors"


def _copy_rest(directory: Path, source: Path, dtype: torch.dtype) -> None:
    for path in sorted(source.iterdir()):
        if path.suffix in COPIED_SUFFIXES and path.name not in (CONFIG_FILE, INDEX_FILE):
            with atomic_path(directory / path.name) as temporary:
                shutil.copyfile(path, temporary)
    config = json.loads((source / CONFIG_FILE).read_bytes())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    write_json(directory / CONFIG_FILE, config)


def mtp_layers(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's multi-token-prediction layers, which are not part of its policy."""
    mtp = family_of(read_model_config(directory)).mtp
    if mtp is None:
        return
    reader = TensorReader(directory)
    for name in sorted(name for name in reader.names if name.startswith(mtp.prefix)):
        yield name, reader.read(name)
