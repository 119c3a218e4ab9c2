"""New weights into a running engine, in place: every tensor arrives, none that does not belong, and it can be shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from specrl.models import mtp
from specrl.rollout.errors import DrafterCollapseError, PolicyParityError, RefitError

Weights = Iterable[tuple[str, Tensor]]
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Layers that the engine holds as one, in the order of their outputs."""
NOT_LOADED = frozenset({"t2d"})
"""Drafter tensors that are derived from others."""
MTP_BLOCK = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
"""Parts of a multi-token-prediction layer that the engine keeps one level deeper."""
PROBE_ROWS = 4
READ_BACK_TOLERANCE = 0.02
"""Of an output's own size and of its row's root mean square; BF16 rounds to 2^-9."""


def weight_names(directory: Path) -> frozenset[str]:
    """Names of the tensors in a directory's safetensors files."""
    names: set[str] = set()
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    if not names:
        raise ValueError(f"no safetensors files in {directory}")
    return frozenset(names)


def policy_weight_names(directory: Path) -> frozenset[str]:
    """Names of the policy's tensors in its directory: a multi-token-prediction layer is a drafter's."""
    names = weight_names(directory)
    return names - _mtp_names(names)


def drafter_weight_names(directory: Path) -> frozenset[str]:
    """Names of the drafter's tensors in an EAGLE-3 directory, or in a policy's with a multi-token-prediction layer."""
    names = weight_names(directory)
    return _mtp_names(names) or names


def _mtp_names(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in names if name.startswith(mtp.PREFIX))


def read_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the policy in a directory, and the head of a tied model, as a refit wants them."""
    names = policy_weight_names(directory)
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if name not in names:
                    continue
                tensor = file.get_tensor(name)
                yield name, tensor
                if name == EMBEDDINGS and HEAD not in names:
                    yield HEAD, tensor


def refit_policy(vllm_config: Any, model: nn.Module, weights: Weights, names: frozenset[str], tied: bool) -> None:
    """Load the policy. With tied embeddings an explicit head is compared with them and not loaded.

    Raises:
        RefitError: a tensor is missing or unknown.
        PolicyParityError: the head of a tied policy differs from its embeddings.
    """
    delivery = Delivery(names - {HEAD} if tied else names | {HEAD}, names | {HEAD}, tied)
    reload_weights(vllm_config, model, delivery.through(weights))
    delivery.check()


def refit_drafter(vllm_config: Any, drafter: nn.Module, weights: Weights, names: frozenset[str]) -> None:
    """Load the drafter; embeddings are the policy's and never part of it.

    Raises:
        RefitError: a tensor is missing or unknown.
    """
    delivery = Delivery(names - NOT_LOADED, names | NOT_LOADED, tied=False)
    reload_weights(vllm_config, drafter, delivery.through(weights))
    delivery.check()


class Delivery:
    """Passes weights on and notes what is wrong with them.

    Errors are raised after loading: a reload that breaks off in the middle leaves layers which cannot be loaded again.
    """

    def __init__(self, required: frozenset[str], known: frozenset[str], tied: bool) -> None:
        self.missing = set(required)
        self.known = known
        self.tied = tied
        self.unknown: list[str] = []
        self.heads: dict[str, Tensor] = {}

    def through(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self.missing.discard(name)
            if self.tied and name in {HEAD, EMBEDDINGS}:
                self.heads[name] = tensor
            if name not in self.known:
                self.unknown.append(name)
            elif not (self.tied and name == HEAD):
                yield name, tensor

    def check(self) -> None:
        if self.unknown:
            raise RefitError(f"refit was sent {', '.join(self.unknown)}, which the model on disk does not have")
        if self.missing:
            raise RefitError(f"refit was not sent {', '.join(sorted(self.missing))}; the engine lacks current values")
        if len(self.heads) == 2 and not torch.equal(self.heads[HEAD], self.heads[EMBEDDINGS]):
            raise PolicyParityError(f"the policy ties {HEAD} to {EMBEDDINGS}, but refit was sent different tensors")


def assert_policy_is(model: nn.Module, weights: Weights) -> None:
    """Raises PolicyParityError where the policy inside the engine is not these tensors; names those that differ."""
    if wrong := differing_tensors(model, weights, drafter=False):
        raise PolicyParityError(f"the engine's policy differs from the trainer's in {', '.join(wrong)}")


def assert_drafter_is(drafter: nn.Module, weights: Weights, policy: nn.Module) -> None:
    """Raises DrafterCollapseError where the drafter inside the engine is not these tensors on the policy's embeddings;
    names those that differ."""
    wrong = differing_tensors(drafter, weights, drafter=True)
    own: Any = drafter.get_submodule("model.embed_tokens")
    shared: Any = policy.get_submodule("model.embed_tokens")
    if not torch.equal(own.weight, shared.weight):
        wrong.append("embed_tokens.weight")
    if wrong:
        raise DrafterCollapseError(f"the engine's drafter differs from the trainer's in {', '.join(wrong)}")


def differing_tensors(model: nn.Module, weights: Weights, *, drafter: bool) -> list[str]:
    """Names of the tensors in `weights` that `model`, inside the engine, does not compute with.

    Linear layers are compared by their output on a fixed random input, because CPU engines keep their weights packed
    only; everything else by value. For engines without tensor parallelism.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        if name in NOT_LOADED:
            continue
        path, _, kind = _engine_name(model, name, drafter).rpartition(".")
        parent, _, leaf = path.rpartition(".")
        groups.setdefault(f"{parent}.{STACKED.get(leaf, leaf)}.{kind}".lstrip("."), {})[name] = tensor
    wrong: list[str] = []
    for path, parts in groups.items():
        module_path, _, kind = path.rpartition(".")
        module = model.get_submodule(module_path)
        ordered = sorted(parts, key=lambda name: list(STACKED).index(name.split(".")[-2]) if len(parts) > 1 else 0)
        if not _matches(module, kind, torch.cat([parts[name] for name in ordered])):
            wrong.extend(ordered)
    return wrong


def _engine_name(model: nn.Module, name: str, drafter: bool) -> str:
    if name.startswith(mtp.PREFIX):
        layers: Any = model.get_submodule("model.mtp_layers")
        rest = name.removeprefix(mtp.PREFIX)
        # The engine counts on from the policy's layers.
        return f"model.mtp_layers.{next(iter(layers))}.{'mtp_block.' if rest.startswith(MTP_BLOCK) else ''}{rest}"
    if not drafter or name == HEAD:
        return name
    if name == "d2t":
        return "draft_id_to_target_id"
    return "model." + name.replace("midlayer.", "layers.0.")


def _matches(module: nn.Module, kind: str, expected: Tensor) -> bool:
    if kind == "weight" and hasattr(module, "quant_method") and expected.dim() == 2 and not _is_embedding(module):
        return _computes_with(module, expected)
    actual: Tensor | None = getattr(module, kind, None)
    if actual is None:
        return False
    return torch.equal(actual[: expected.shape[0]].cpu(), expected.to(actual.dtype).cpu())


def _is_embedding(module: nn.Module) -> bool:
    return "Embedding" in type(module).__name__


def _computes_with(layer: nn.Module, weight: Tensor) -> bool:
    """Whether the layer's output on a fixed random input is that of `weight` [out, in], element by element.

    A layer in emulated FP8 must compute with both quantised: rounding changes its output by more than the tolerance.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(PROBE_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    method: Any = layer.quant_method
    if hasattr(method, "quantise_weight"):
        reference = method.quantise_inputs(inputs).float() @ method.quantise_weight(weight).float().T
    else:
        reference = inputs.float() @ weight.cpu().float().T  # [PROBE_ROWS, out]
    actual = linear_output(layer, inputs.to(weight.device)).float().cpu()[:, : weight.shape[0]]
    if actual.shape != reference.shape:
        return False
    scale = reference.abs() + reference.pow(2).mean(-1, keepdim=True).sqrt()
    return bool(((actual - reference).abs() <= READ_BACK_TOLERANCE * scale).all())


def reload_weights(vllm_config: Any, model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights with on-disk names in place. On CPUs linear weights are packed after loading: each is packed anew.

    A head tied to the embeddings keeps its own packed copy, which a reload leaves as it was: it is packed again too.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import inplace

    with torch.inference_mode(), set_current_vllm_config(vllm_config):
        inplace.reload_weights(
            vllm_config, model, weights_iterator=weights, weights_path=None, is_checkpoint_format=True
        )
        head, embeddings = getattr(model, "lm_head", None), getattr(model.model, "embed_tokens", None)
        if head is not None and embeddings is not None and head.weight is embeddings.weight:
            head.quant_method.process_weights_after_loading(head)


def linear_output(layer: nn.Module, inputs: Tensor) -> Tensor:
    """What a linear layer or head of the engine computes with its packed weight, no bias: [n, in] -> [n, out]."""
    method: Any = layer.quant_method
    with torch.inference_mode():
        output: Tensor = method.apply(layer, inputs, None)
    return output
