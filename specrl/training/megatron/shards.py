"""This rank's share of the optimizer's state, described by rectangles of Hugging Face tensors.

Megatron's distributed optimizer gives each data-parallel rank ranges of the flattened parameters, and those are parts
of fused matrices that tensor parallelism has split. The rectangles say which elements they are, in every layout.
"""

from __future__ import annotations

import torch

from specrl.training.checkpoint.pieces import Band, Piece, Shard, cut
from specrl.training.megatron.optimizer import PolicyOptimizer
from specrl.training.megatron.weights import Parameter, WeightMap


def policy_shards(model: torch.nn.Module, weights: WeightMap, optimizer: PolicyOptimizer) -> list[Shard]:
    """What this rank holds of each parameter of its part of the model; the tensors are not copies."""
    own = dict(model.named_parameters())
    shards = []
    for parameter in weights.parameters:
        if not parameter.is_here:
            continue
        held = optimizer.share_of(own[parameter.name])
        if held is None:
            continue
        (start, stop), state = held
        rank, size = parameter.place
        pieces = cut(bands(weights, parameter, rank, size), start, stop)
        length = sum(piece.size for piece in pieces)  # what follows is the padding of the vocabulary
        is_written = not parameter.is_copy and (parameter.split != "none" or rank == 0)
        shards.append(Shard(tuple(pieces), {name: flat[:length] for name, flat in state.items()}, is_written))
    return shards


def tensor_shapes(weights: WeightMap) -> dict[str, tuple[int, ...]]:
    """The shape of every Hugging Face tensor that the model is made of, by its name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter in weights.parameters:
        for band in bands(weights, parameter, 0, 1):
            name, rows = band.piece.tensor, band.piece.rows[1]
            shapes[name] = (rows, *parameter.shape[1:])  # a tensor's last band has its last row
    return shapes


def bands(weights: WeightMap, parameter: Parameter, rank: int, size: int) -> list[Band]:
    """Which rows of the parameter's Hugging Face tensors the rows of a tensor-parallel rank's matrix are."""
    rows, width = parameter.shape[0], parameter.shape[1] if len(parameter.shape) > 1 else 1
    if parameter.split == "none":
        return [Band(0, Piece(parameter.hf[0], (0, rows), (0, width)))]
    if parameter.split == "columns":
        step = width // size
        return [Band(0, Piece(parameter.hf[0], (0, rows), (rank * step, (rank + 1) * step)))]
    if parameter.split == "vocabulary":
        step = rows // size
        last = min((rank + 1) * step, weights.vocab_size)
        return [Band(0, Piece(parameter.hf[0], (rank * step, last), (0, width)))] if rank * step < last else []
    if parameter.split == "gate_up":
        groups, heights = 1, [rows // 2 // size] * 2
    else:
        groups = weights.num_groups // size
        heights = [rows // weights.num_groups - 2 * weights.head_dim, weights.head_dim, weights.head_dim]
    found, first = list[Band](), 0
    for group in range(rank * groups, (rank + 1) * groups):
        for name, height in zip(parameter.hf, heights, strict=True):
            found.append(Band(first, Piece(name, (group * height, (group + 1) * height), (0, width))))
            first += height
    return found
