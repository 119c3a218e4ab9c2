"""Checkpoints of policy and drafter: exact to the bit on the layout they were written on.

`directory/step=000012/` holds one safetensors file per rank (its share of FP32 masters and Adam state), the drafter
once, and `manifest.json`, with the scales of an FP8 KV cache, written last. Everything is written in a temporary folder
that is then renamed. Only the layout that wrote a checkpoint reads it; `Policy.save_pretrained` is the format for
everyone else.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specrl.artifacts import write_json
from specrl.precision.recipe import KvScales
from specrl.training.megatron.policy import Policy

MANIFEST = "manifest.json"
DRAFTER = "drafter.pt"
FORMAT = 1


class Stateful(Protocol):
    """The interface by which a checkpoint sees the drafter, which is the same on every rank."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def save(
    directory: Path,
    policy: Policy,
    drafter: Stateful | None,
    step: int,
    keep: int,
    kv_scales: KvScales | None = None,
) -> None:
    """Write `directory/step=NNNNNN` and remove all but the newest `keep` checkpoints (collective).

    Args:
        step: The step to run next after a restart.
        kv_scales: The scales of the engine's FP8 KV cache with which that step generates.
    """
    ranks = policy.ranks
    final = directory / f"step={step:06d}"
    temporary = directory / f".step={step:06d}.tmp"
    if ranks.is_first:
        for unfinished in directory.glob(".step=*.tmp"):
            shutil.rmtree(unfinished)
        temporary.mkdir(parents=True)
    ranks.barrier()
    with ThreadPoolExecutor(1) as beside:  # the drafter is on disk long before the policy's share: it costs no time
        if ranks.is_first and drafter is not None:
            written = beside.submit(_write, temporary / DRAFTER, partial(torch.save, drafter.state_dict()))
        _write(temporary / _rank_file(ranks.rank), lambda path: save_file(_contiguous(policy.optimizer.state()), path))
    if ranks.is_first and drafter is not None:
        written.result()
    ranks.barrier()
    if ranks.is_first:
        state = {"step": step, "drafter": drafter is not None, "kv_scales": asdict(kv_scales) if kv_scales else None}
        write_json(temporary / MANIFEST, {**_describe(policy), **state})
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
        _sync_directory(directory)
        for old in _complete(directory)[:-keep]:
            shutil.rmtree(old)
    ranks.barrier()


def load(directory: Path, policy: Policy, drafter: Stateful | None) -> int:
    """Restore policy, optimizer and drafter from one checkpoint (see `latest`) and return its step (collective).

    Raises:
        ValueError: The checkpoint was written with another model, layout or precision, or without a drafter; the line
            says which.
    """
    manifest = json.loads((directory / MANIFEST).read_text())
    for key, expected in _describe(policy).items():
        if manifest.get(key) != expected:
            raise ValueError(
                f"checkpoint {directory} was written with {key} = {manifest.get(key)}, this run has {expected}: "
                "resume with the same setting, or start a new run from the exported policy"
            )
    if drafter is not None and not manifest["drafter"]:
        raise ValueError(f"checkpoint {directory} holds no drafter: resume with speculation.method as it was")
    policy.optimizer.load_state(load_file(directory / _rank_file(policy.ranks.rank)))
    if drafter is not None:
        drafter.load_state_dict(torch.load(directory / DRAFTER, map_location="cpu", weights_only=True))
    policy.ranks.barrier()
    return int(manifest["step"])


def kv_scales(directory: Path) -> KvScales | None:
    """Return the scales of the KV cache that `save` was given, or None."""
    found = json.loads((directory / MANIFEST).read_text()).get("kv_scales")
    return KvScales(**found) if found else None


def latest(directory: Path) -> Path | None:
    """Return the newest complete checkpoint below `directory`, or None."""
    found = _complete(directory)
    return found[-1] if found else None


def _complete(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.glob(f"step=*/{MANIFEST}"))


def _rank_file(rank: int) -> str:
    return f"policy-rank{rank:05d}.safetensors"


def _describe(policy: Policy) -> dict[str, Any]:
    hf = policy.hf_config
    return {
        "format": FORMAT,
        "tensor_parallel": policy.tp_size,
        "pipeline_parallel": policy.pp_size,
        "data_parallel": policy.dp_size,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "model": f"{hf.model_type}, {hf.num_hidden_layers} layers of {hf.hidden_size}, vocabulary {hf.vocab_size}",
    }


def _contiguous(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in state.items()}


def _write(path: Path, write: Callable[[Path], None]) -> None:
    write(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
