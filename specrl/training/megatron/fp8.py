"""Blockwise FP8 (e4m3), emulated: the numbers of the GPU recipe on hardware without it.

Recipe: activations and gradients in blocks of 1x128 along the dimension that the matrix product sums over, weights in
blocks of 128x128, one FP32 scale amax / 448 per block. Matrix products use dequantised values in the compute type and
accumulate in it; embeddings, output layer and norms are not quantised.
(DeepSeek-V3, arXiv:2412.19437, section 3.3; Transformer Engine's `Float8BlockScaling`.)

Blocks of a fused weight start anew at each of its matrices: q, k, v, gate and up are quantised as stored on disk, so
that the engine, which fuses them in another order of rows, gets the same numbers.

Megatron-core without Transformer Engine silently ignores `fp8=`. Here a layer that cannot be emulated is refused, and
`LinearPrecision.assert_quantised` fails if a weight or activation was not quantised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from specrl.models.families import Layout, Linear
from specrl.precision import native
from specrl.precision.blocks import ALONG_ROWS, ALONG_TOKENS, fake_quantise, fake_quantise_rows
from specrl.precision.recipe import Mode, NotQuantisedError, layer_names


def fused_rows(layout: Layout, rows: int, config: Any) -> tuple[tuple[int, ...], Tensor | None]:
    """The row counts of the matrices in a rank's weight, in the engine's order, and the order of the rows.

    The order is None if it is the weight's own. Megatron stores queries group by group, each followed by its key and
    its value.
    """
    if layout == "gate_up":
        return (rows // 2, rows // 2), None
    if layout == "columns":
        return (rows,), None
    width = config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups * width
    groups = torch.arange(rows).view(-1, queries + 2 * width)
    parts = [part.flatten() for part in torch.split(groups, [queries, width, width], 1)]
    return tuple(len(part) for part in parts), torch.cat(parts)


class EmulatedLinear:
    """Replaces `_forward_impl` of one Megatron linear layer: all three products have quantised operands."""

    def __init__(self, name: str, module: Any, sizes: tuple[int, ...], order: Tensor | None) -> None:
        self.name = name
        self.module = module
        self.sizes, self.order = sizes, order
        self.active = True
        """Whether the layer computes in FP8; otherwise it computes as if it had not been attached."""
        self.num_forwards = 0
        self.num_backwards = 0
        self._plain: Any = module._forward_impl

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **others: Any,
    ) -> Tensor:
        """This tensor-parallel rank's output [..., out] for the input [..., in]."""
        if not self.active:
            plain: Tensor = self._plain(
                input, weight, bias=bias, allreduce_dgrad=allreduce_dgrad, tp_group=tp_group, **others
            )
            return plain
        if others.get("sequence_parallel"):  # each rank has a part of the sequence, and of its gradient
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        group = tp_group if allreduce_dgrad else None
        output: Tensor = _QuantisedProduct.apply(input, weight, self.quantised_weight(), self, group)  # type: ignore[no-untyped-call]
        self.num_forwards += 1
        return output if bias is None else output + bias

    @torch.no_grad()
    def quantised_weight(self) -> Tensor:
        """The weight's dequantised values [out, in]."""
        weight: Tensor = self.module.weight.detach()
        if self.order is None:
            return fake_quantise_rows(weight, self.sizes)
        order = self.order.to(weight.device)
        quantised = fake_quantise_rows(weight[order], self.sizes)
        return torch.empty_like(quantised).index_copy_(0, order, quantised)


class _QuantisedProduct(torch.autograd.Function):
    """Computes y = Q(x) Q(W)^T; dx = Q(dy) Q(W); dW = Q'(dy)^T Q'(x).

    Q' has its blocks along the tokens, over which the last product sums.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, quantised: Tensor, layer: EmulatedLinear, group: dist.ProcessGroup | None
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # [tokens, in]
        ctx.save_for_backward(flat, quantised)
        ctx.layer, ctx.group, ctx.shape = layer, group, x.shape
        return (fake_quantise(flat, ALONG_ROWS) @ quantised.t()).view(*x.shape[:-1], quantised.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, quantised = ctx.saved_tensors
        layer: EmulatedLinear = ctx.layer
        flat = grad.reshape(-1, grad.shape[-1])  # [tokens, out]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (fake_quantise(flat, ALONG_ROWS) @ quantised).view(ctx.shape)
            if ctx.group is not None:
                dist.all_reduce(grad_x, group=ctx.group)
        if ctx.needs_input_grad[1]:
            grad_weight = fake_quantise(flat, ALONG_TOKENS).t() @ fake_quantise(x, ALONG_TOKENS)
        layer.num_backwards += 1
        return grad_x, grad_weight, None, None, None


def linear_layers(model: Any) -> dict[str, tuple[Linear, Any]]:
    """The linear layers of this rank's transformer layers: each one's entry in the family, and its module.

    Names such as `layers.3.linear_fc2` count the layers of all pipeline stages. Those of experts are
    `layers.3.experts.17.linear_fc2` or, where Transformer Engine has one module for all experts of the rank,
    `layers.3.experts.linear_fc2`.
    """
    found: dict[str, tuple[Linear, Any]] = {}
    for layer in model.decoder.layers:
        for linear in model.family.linears:
            name = f"layers.{layer.layer_number - 1}.{linear.name}"
            if linear.is_expert:
                found |= {f"{name}.{own}": (linear, module) for own, module in _expert_modules(layer, linear)}
            else:
                found[name] = linear, layer.get_submodule(linear.megatron)
    return found


def _expert_modules(layer: Any, linear: Linear) -> Iterator[tuple[str, Any]]:
    own = linear.megatron.rpartition(".")[2]
    experts = layer.mlp.experts
    if not hasattr(experts, "local_experts"):
        yield own, experts.get_submodule(own)
        return
    for index, expert in zip(layer.mlp.local_expert_indices, experts.local_experts, strict=True):
        yield f"{index}.{own}", expert.get_submodule(own)


def layer_of(name: str) -> str:
    return ".".join(name.split(".")[:3])


class LinearPrecision:
    """Makes the linear layers of one policy compute in FP8, except `bf16_layers`.

    `Policy(..., fp8=LinearPrecision(...))` attaches it; `assert_quantised` checks afterwards that it took effect. With
    `emulates`, FP8 is emulated on GPUs too, and single layers can be switched.
    """

    def __init__(self, bf16_layers: Collection[str] = (), *, emulates: bool = False) -> None:
        self.bf16_layers = frozenset(bf16_layers)
        self.is_native = torch.cuda.is_available() and not emulates
        self.linears: dict[str, EmulatedLinear] = {}
        self._native: dict[str, Any] = {}
        """All linear layers of this rank by name, if Transformer Engine computes them."""
        self._expected: frozenset[str] | None = None

    @property
    def mode(self) -> Mode:
        """How the trainer computes FP8; `off` if every layer stays in BF16 or there is no policy yet."""
        if self._native and self._expected:
            return "native"
        return "emulated" if self.linears else "off"

    def attach(self, model: Any) -> None:
        """Take over the linear layers of a `PolicyModel`."""
        assert self._expected is None, "a LinearPrecision belongs to one policy"
        unknown = sorted(self.bf16_layers - {*layer_names(model.family, model.config.num_layers)})
        assert not unknown, f"layers of another model: {unknown}"
        layers = linear_layers(model)
        kept = frozenset(name for name in layers if layer_of(name) in self.bf16_layers)
        self._expected = frozenset(layers) - kept
        if self.is_native:
            self._native = {name: module for name, (_, module) in layers.items()}
            native.keep_in_bf16(self._native, kept)
            return
        for name, (linear, module) in layers.items():
            if name in kept:
                continue
            is_local = isinstance(module, ColumnParallelLinear | RowParallelLinear)
            assert is_local, f"FP8 cannot be emulated in {name}, a {type(module).__name__}"
            rows = fused_rows(linear.layout, module.weight.shape[0], model.config)
            module._forward_impl = self.linears[name] = EmulatedLinear(name, module, *rows)

    def set_fp8(self, names: Collection[str]) -> None:
        """Let exactly these layers compute in emulated FP8; names of layers that other ranks hold are ignored here."""
        for name, linear in self.linears.items():
            linear.active = layer_of(name) in names

    def assert_quantised(self, *, trained: bool = False) -> None:
        """Raise NotQuantisedError unless every layer that should compute in FP8 has done so.

        Call it after a forward pass, with `trained` after a training step.
        """
        if self._expected is None:
            raise NotQuantisedError("no policy has taken this LinearPrecision: nothing was quantised")
        if self._native:
            wrong = [
                n for n, module in self._native.items() if bool(getattr(module, "fp8", False)) != (n in self._expected)
            ]
            if wrong:
                raise NotQuantisedError(f"{min(wrong)} does not compute in the precision that was calibrated")
            return
        for name in sorted(self._expected):
            linear = self.linears.get(name)
            if linear is None or linear.module._forward_impl is not linear or not linear.active:
                raise NotQuantisedError(f"{name} computes in the model's own precision, not in FP8")
            if not linear.num_forwards or (trained and not linear.num_backwards):
                raise NotQuantisedError(
                    f"{name} has run no {'backward' if linear.num_forwards else 'forward'} pass in FP8"
                )
