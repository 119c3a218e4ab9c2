"""LoRA (arXiv 2106.09685): each matrix W of a linear layer is replaced by W + alpha / rank * B A; A and B are trained.

The trainer computes with the sum in the compute type, as loaded into the engine. Separate products with A and B would
keep digits that the engine lacks: it would sample from another policy than the trained one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from specrl.artifacts import write_json
from specrl.config.training import LoraConfig
from specrl.data.problems import derive_seed
from specrl.models.hf_io import write_tensors

DOWN, UP = "lora_A.weight", "lora_B.weight"
"""PEFT's names of A, [rank, in], and B, [out, rank], below their module."""
FOLDER = "adapter"
"""The folder of a policy's adapters in PEFT's format, beside the policy's folder."""


class LowRankUpdate(nn.Module):
    """A parametrisation of a weight that Megatron fuses from several matrices, each with its own adapters."""

    def __init__(
        self,
        down: Iterable[nn.Parameter],
        up: Iterable[nn.Parameter],
        scale: float,
        merge: Callable[[Sequence[Tensor]], Tensor],
    ) -> None:
        super().__init__()
        self.down, self.up = nn.ParameterList(down), nn.ParameterList(up)
        self._scale, self._merge = scale, merge

    def forward(self, weight: Tensor) -> Tensor:
        parts = [up @ down for down, up in zip(self.down, self.up, strict=True)]
        return torch.add(weight, self._merge(parts), alpha=self._scale)


def initial(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A whole adapter before training: B is 0, and A is drawn as in PEFT, with a separate seed for each name."""
    if name.endswith(UP):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def merged(
    weights: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], scale: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole Hugging Face tensors with their adapters, if any, merged in."""
    for name, weight in weights:
        module = name.removesuffix("weight")
        if module + DOWN in adapters:
            up, down = (adapters[module + end].to(weight.dtype) for end in (UP, DOWN))
            yield name, torch.add(weight, up @ down, alpha=scale)
        else:
            yield name, weight


def write_adapter(directory: Path, base_dir: Path, config: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write adapters, given by their names in the model, as PEFT does; `adapter_config.json` comes last."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(
        directory / "adapter_model.safetensors", {f"base_model.model.{name}": t for name, t in tensors.items()}
    )
    modules = sorted({name.removesuffix(f".{DOWN}").rpartition(".")[2] for name in tensors if name.endswith(DOWN)})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_dir),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(directory / "adapter_config.json", described)
