"""A checkpoint's policy as a Hugging Face directory, written from the checkpoint's files without a trainer.

This needs no GPU, no layout and no optimizer: the files hold rectangles of Hugging Face tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from specrl.distributed import Ranks
from specrl.models.directory import read_model_config
from specrl.models.families import family_of
from specrl.models.hf_io import TensorReader, mtp_layers, write_model
from specrl.training.checkpoint.manifest import Manifest, StoredPolicy, check_whole, read_manifest
from specrl.training.lora import merged
from specrl.training.pieces import MASTER, Piece

ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
"""The suffixes of the names of tensors whose rows are paired by the rotary embedding."""


def write_policy_folder(folder: Path, base_dir: Path, directory: Path, dtype: torch.dtype, ranks: Ranks) -> None:
    """Write the policy of a checkpoint as a Hugging Face directory, verified (collective); rank 0 writes.

    `base_dir` is the policy from which that training began: its configuration, tokenizer and multi-token-prediction
    layers are not part of a checkpoint. At most `hf_io.FILE_BYTES` and one tensor are in memory.
    """
    check_whole(folder, ranks)
    if ranks.is_first:
        directory.mkdir(parents=True, exist_ok=True)
        manifest = read_manifest(folder)
        stored: Iterable[tuple[str, Tensor]] = _masters(folder, manifest, base_dir)
        if manifest.adapter_scale is None:
            stored = chain(stored, mtp_layers(base_dir))
        else:
            adapters = {name: tensor.to(dtype) for name, tensor in stored}
            weights = ((name, tensor.to(dtype)) for name, tensor in TensorReader(base_dir).items())
            stored = merged(weights, adapters, manifest.adapter_scale)
        write_model(directory, base_dir, ((name, tensor.to(dtype)) for name, tensor in stored), dtype, writes=True)
    ranks.barrier()


def _masters(folder: Path, manifest: Manifest, base_dir: Path) -> Iterator[tuple[str, Tensor]]:
    config = read_model_config(base_dir)
    stored = StoredPolicy(folder, manifest)
    # All are opened at once: open files stay readable even if a run removes its old checkpoints.
    for file in manifest.files:
        if file.pieces:
            stored.file(file.name)
    interleaved = ROTATED if family_of(config).rotary_interleaved else ()
    width = config.get("head_dim") or config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    for name, shape in manifest.tensors.items():
        tensor = torch.empty(tuple(shape))
        matrix = tensor.view(shape[0], -1)
        stored.read(Piece(name, (0, matrix.shape[0]), (0, matrix.shape[1])), {MASTER: matrix})
        if name.endswith(interleaved):  # Megatron, and so the checkpoint, stores a head's channels in halves
            tensor = matrix.view(-1, 2, width // 2, matrix.shape[1]).transpose(1, 2).reshape(shape)
        yield name, tensor
