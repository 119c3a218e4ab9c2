"""Megatron's DistributedDataParallel and distributed optimizer: FP32 gradients, masters and moments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from specrl.config import PolicyConfig
from specrl.training.megatron.weights import WeightMap, bands
from specrl.training.pieces import KINDS, MASTER, REFERENCE, Shard, cut


def wrap(model: torch.nn.Module, config: TransformerConfig) -> DistributedDataParallel:
    """The model with parameters and FP32 gradients in contiguous buffers, reduced over data-parallel ranks."""
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        # "If true, overlap grad all-reduce / reduce-scatter with backward compute" (`DistributedDataParallelConfig`).
        overlap_grad_reduce=parallel_state.get_data_parallel_world_size() > 1,
        # Its counterpart would "overlap param all-gather with forward compute", but what follows an update here is the
        # refit, which reads every parameter at once; the next forward pass would only gather them a second time.
        overlap_param_gather=False,
    )
    wrapped = DistributedDataParallel(config, ddp, model)
    config.no_sync_func = wrapped.no_sync  # only the last micro-batch communicates gradients
    for layer in model.modules():
        if hasattr(layer, "fuse_wgrad_accumulation") and not is_parametrized(layer):
            # Transformer Engine: "enables fusing of creation and accumulation of the weight gradient. When enabled, it
            # is assumed that the weights have an additional `main_grad` attribute [...] to accumulate gradients in".
            # `TransformerConfig.gradient_accumulation_fusion` would ask for APEX in the output layer.
            setattr(layer, "fuse_wgrad_accumulation", True)  # noqa: B010  (mypy takes it for a tensor)
    return wrapped


class PolicyOptimizer:
    """AdamW over this rank's share of the FP32 masters, with gradient clipping."""

    def __init__(self, ddp: DistributedDataParallel, config: PolicyConfig, *, dtype: torch.dtype) -> None:
        options = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            clip_grad=config.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        overrides = get_standard_config_overrides(options)
        self._ddp = ddp
        self._megatron = get_megatron_optimizer(
            options, [ddp], config_overrides=overrides, use_gloo_process_groups=False
        )
        self._parts: list[Any] = self._megatron.chained_optimizers
        """The optimizer of the parameters that all data-parallel ranks share and, with experts, that of the experts."""
        self._clip_grad = config.clip_grad
        self._is_fused = not torch.cuda.is_available()
        if self._is_fused:
            for group in self._megatron.param_groups:
                group["fused"] = True  # one pass over memory; Transformer Engine's Adam on GPUs is fused anyway

    def zero_grad(self) -> None:
        self._ddp.zero_grad_buffer()
        self._megatron.zero_grad()

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Clip, update the masters and give every rank the new parameters; return the gradient's norm (collective).

        Raises FloatingPointError if the norm, which all ranks share, is not finite; nothing has been updated.
        """
        # Megatron's own `step` would apply it: without FP16 it checks no gradient.
        self._megatron.prepare_grads()
        norm = float(self._megatron.get_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the policy's gradient is {norm}; its weights are unchanged")
        for part in self._parts:
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, max_norm=self._clip_grad, total_norm=norm)
        for group in self._megatron.param_groups:
            group["lr"] = lr
        self._megatron.step_with_ready_grads()
        return norm

    def share_of(self, parameter: Tensor) -> tuple[tuple[int, int], dict[str, Tensor]] | None:
        """The elements of a parameter that this rank updates, and their flat FP32 state by `KINDS`, not copied.

        None if this rank updates none of them.
        """
        owners = [part for part in self._parts if parameter in part.model_param_group_index_map]
        if not owners:
            return None
        (owner,) = owners
        elements = owner._get_model_param_range_map(parameter)["param"]
        group, position = owner.model_param_group_index_map[parameter]
        main = owner.optimizer.param_groups[group]["params"][position]
        state = owner.optimizer.state[main]
        if not state:  # before the first update, as Adam would begin
            state.update(exp_avg=torch.zeros_like(main), exp_avg_sq=torch.zeros_like(main))
            if self._counts_per_parameter:
                state["step"] = torch.zeros((), device=main.device if self._is_fused else "cpu")
        moments = {name: state[name].detach() for name in KINDS if name != MASTER}
        return (elements.start, elements.end), {MASTER: main.detach().view(-1), **moments}

    def counters(self) -> dict[str, int]:
        return {"adam_steps": self._adam_steps()}

    @torch.no_grad()
    def restored(self, counters: Mapping[str, int]) -> None:
        """Continue from the state copied into the tensors of `share_of`, and from `counters` (collective)."""
        for part in self._parts:
            if self._counts_per_parameter:
                for state in part.optimizer.state.values():
                    state["step"].fill_(counters["adam_steps"])
            else:
                for group in part.optimizer.param_groups:
                    group["step"] = counters["adam_steps"]
            part._copy_main_params_to_model_params()
        self._ddp.start_param_sync(force_sync=True)

    @property
    def _counts_per_parameter(self) -> bool:
        return isinstance(self._parts[0].optimizer, torch.optim.Adam)

    def _adam_steps(self) -> int:
        if self._counts_per_parameter:
            states = chain.from_iterable(part.optimizer.state.values() for part in self._parts)
            found = {int(state["step"]) for state in states if state}
        else:
            groups = self._megatron.param_groups
            found = {int(group["step"]) for group in groups if group["params"] and "step" in group}
        assert len(found) <= 1, f"parameters with different numbers of Adam's steps: {sorted(found)}"
        return found.pop() if found else 0


def policy_shards(
    model: torch.nn.Module, weights: WeightMap, optimizer: PolicyOptimizer, reference: Sequence[Tensor] = ()
) -> list[Shard]:
    """The shards of this rank; those of a reference, which is given in the parameters' form, are copies."""
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    others = dict(zip(own, reference, strict=False))
    shards = []
    for parameter in weights.parameters:
        if not parameter.is_here:
            continue
        held = optimizer.share_of(own[parameter.name])
        if held is None:
            continue
        (start, stop), state = held
        if parameter.name in others:
            state[REFERENCE] = others[parameter.name].flatten()[start:stop].float()
        rank, size = parameter.place
        pieces = cut(bands(weights, parameter, rank, size), start, stop)
        length = sum(piece.size for piece in pieces)  # the rest is padding of the vocabulary
        is_written = not parameter.is_copy and (parameter.split != "none" or rank == 0)
        shards.append(Shard(tuple(pieces), {name: flat[:length] for name, flat in state.items()}, is_written))
    return shards
