"""What a checkpoint holds, put together from its pieces."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specrl.training.checkpoint.manifest import read_manifest
from specrl.training.pieces import KINDS, stored_name


def whole_state(folder: Path) -> dict[str, Tensor]:
    """Masters and moments by kind and Hugging Face name, as matrices; every element is stored once."""
    manifest = read_manifest(folder)
    found = {
        f"{kind} {name}": torch.full((shape[0], *(shape[1:] or (1,))), torch.nan)
        for name, shape in manifest.tensors.items()
        for kind in KINDS
    }
    for file in manifest.files:
        tensors = load_file(folder / file.name)
        for piece in file.pieces:
            for kind in KINDS:
                target = found[f"{kind} {piece.tensor}"][slice(*piece.rows), slice(*piece.columns)]
                assert bool(target.isnan().all()), f"{piece} is stored twice"
                target.copy_(tensors[stored_name(kind, piece)])
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found
