"""A checkpoint's policy as a Hugging Face directory, written from the checkpoint's files without a trainer.

This needs no GPU, no layout and no optimizer: the files hold rectangles of Hugging Face tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specrl.distributed import Ranks
from specrl.models.directory import read_model_config
from specrl.models.families import family_of
from specrl.models.hf_io import TensorReader, write_model
from specrl.training.checkpoint.manifest import (
    MASTER,
    Manifest,
    check_whole,
    pieces_by_tensor,
    read_manifest,
    stored_name,
)
from specrl.training.checkpoint.pieces import Piece


def write_policy_folder(folder: Path, base_dir: Path, directory: Path, dtype: torch.dtype, ranks: Ranks) -> None:
    """Write the policy of a checkpoint as a Hugging Face directory, verified (collective); rank 0 writes.

    At most `hf_io.FILE_BYTES` and one tensor are in memory.

    Args:
        base_dir: The policy from which that training began. Its configuration, tokenizer and layers for
            multi-token prediction, which are no part of a policy's checkpoint, are taken as they are.
        dtype: What the FP32 master weights are rounded to.
    """
    check_whole(folder, ranks)
    if ranks.is_first:
        directory.mkdir(parents=True, exist_ok=True)
        stored = chain(_masters(folder, read_manifest(folder)), mtp_layers(base_dir))
        write_model(directory, base_dir, ((name, tensor.to(dtype)) for name, tensor in stored), dtype, writes=True)
    ranks.barrier()


def _masters(folder: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    held = pieces_by_tensor(manifest)
    # All are opened at once: what is open can be read to its end, although a run removes its old checkpoints.
    files: dict[str, Any] = {
        file.name: safe_open(folder / file.name, framework="pt") for file in manifest.files if file.pieces
    }
    for name, shape in manifest.tensors.items():
        tensor = torch.empty(tuple(shape))
        matrix = tensor.view(shape[0], -1)
        whole = Piece(name, (0, matrix.shape[0]), (0, matrix.shape[1]))
        for file, piece in held[name]:
            matrix[piece.inside(whole)] = files[file].get_tensor(stored_name(MASTER, piece))
        assert sum(piece.size for _, piece in held[name]) == whole.size, f"{folder} does not hold all of {name}"
        yield name, tensor


def mtp_layers(base_dir: Path) -> Iterator[tuple[str, Tensor]]:
    mtp = family_of(read_model_config(base_dir)).mtp
    if mtp is None:
        return
    reader = TensorReader(base_dir)
    for name in sorted(name for name in reader.names if name.startswith(mtp.prefix)):
        yield name, reader.read(name)
