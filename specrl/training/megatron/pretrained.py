"""Writes a Hugging Face directory from streamed tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specrl.artifacts import atomic_path, write_json
from specrl.training.megatron.weights import INDEX_FILE

FILE_BYTES = 4 * 2**30
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")


def write_pretrained(
    directory: Path, source: Path, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, *, writes: bool
) -> None:
    """Weights from `tensors`, tokenizer and configuration from `source`; the configuration last.

    Args:
        writes: only one rank does; the others take the tensors from the iterator all the same, for its collectives.
    """
    files: list[dict[str, Tensor]] = [{}]
    names: dict[str, str] = {}
    size = 0
    for name, tensor in tensors:
        if not writes:
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if files[-1] and size + nbytes > FILE_BYTES:
            _write(directory / f"part-{len(files)}.safetensors", files[-1], source / "config.json")
            files[-1] = dict.fromkeys(files[-1], torch.empty(0))
            files.append({})
            size = 0
        files[-1][name] = tensor.to("cpu", copy=True).contiguous()
        size += nbytes
    if not writes:
        return
    _write(directory / f"part-{len(files)}.safetensors", files[-1], source / "config.json")
    for number, content in enumerate(files, 1):
        final = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (directory / f"part-{number}.safetensors").replace(directory / final)
        names.update(dict.fromkeys(content, final))
    if len(files) > 1:
        write_json(directory / INDEX_FILE, {"metadata": {}, "weight_map": names})
    _write_rest(directory, source, dtype)


def _write(path: Path, tensors: dict[str, Tensor], like: Path) -> None:
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
        shutil.copymode(like, temporary)  # safetensors writes files that only their owner may read


def _write_rest(directory: Path, source: Path, dtype: torch.dtype) -> None:
    for path in sorted(source.iterdir()):
        if path.suffix in COPIED_SUFFIXES and path.name not in ("config.json", INDEX_FILE):
            with atomic_path(directory / path.name) as temporary:
                shutil.copyfile(path, temporary)
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    write_json(directory / "config.json", config)
