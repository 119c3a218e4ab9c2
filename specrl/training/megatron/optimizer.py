"""Megatron's DistributedDataParallel and distributed optimizer: FP32 gradients, masters and moments."""

from __future__ import annotations

from typing import Any

import specrl.training.megatron.cpu_shim  # noqa: F401  (must precede megatron)

# isort: split
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from specrl.config import PolicyConfig
from specrl.training.schedules import lr_factor


def wrap(model: torch.nn.Module, config: TransformerConfig) -> DistributedDataParallel:
    """Return the model with parameters and FP32 gradients in contiguous buffers, reduced over data-parallel ranks."""
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    return DistributedDataParallel(config, ddp, model)


class PolicyOptimizer:
    """AdamW over this rank's share of the FP32 masters, with gradient clipping and a learning-rate schedule.

    Args:
        num_updates: The number of updates of the whole run, over which the learning rate falls; None where the schedule
            is constant or each update is given its learning rate.
    """

    def __init__(
        self, ddp: DistributedDataParallel, config: PolicyConfig, *, dtype: torch.dtype, num_updates: int | None
    ) -> None:
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
        self._megatron = get_megatron_optimizer(options, [ddp], config_overrides=overrides)
        (self._distributed,) = self._megatron.chained_optimizers
        self._adam: Any = self._distributed.optimizer
        self._config = config
        self._planned_updates = num_updates
        self.num_updates = 0
        """The number of updates made so far."""
        if not torch.cuda.is_available():
            for group in self._adam.param_groups:
                group["fused"] = True  # one pass over memory; Transformer Engine's Adam on GPUs is fused anyway

    def zero_grad(self) -> None:
        """Set all gradients to zero, before the first backward pass of an update."""
        self._ddp.zero_grad_buffer()
        self._megatron.zero_grad()

    @property
    def learning_rate(self) -> float:
        """The learning rate that the schedule has for the next update."""
        config = self._config
        assert self._planned_updates is not None or config.lr_schedule == "constant", "a decay needs its end"
        return config.lr * lr_factor(
            self.num_updates,
            self._planned_updates or 1,
            decay=config.lr_schedule,
            warmup_steps=config.lr_warmup_steps,
            final_fraction=config.lr_final_fraction,
        )

    def step(self, lr: float) -> float:
        """Clip, update the masters and give every rank the new parameters; return the gradient's norm (collective)."""
        for group in self._megatron.param_groups:
            group["lr"] = lr
        _, norm, _ = self._megatron.step()
        self.num_updates += 1
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Return this rank's FP32 masters, moments and counters by position; they are not copies."""
        state = {"num_updates": torch.tensor(self.num_updates)}
        for key, parameter in self._main_parameters():
            state[f"{key}.master"] = parameter.detach()
            for name, tensor in self._adam.state.get(parameter, {}).items():
                state[f"{key}.{name}"] = tensor.detach()
        for number, group in enumerate(self._adam.param_groups):
            if "step" in group:  # Transformer Engine counts per group, PyTorch per parameter
                state[f"group{number}.step"] = torch.tensor(int(group["step"]))
        return state

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from what `state` returned on this rank of the same layout (collective).

        Raises:
            ValueError: The state belongs to another layout or model.
        """
        self.num_updates = int(state["num_updates"])
        for key, parameter in self._main_parameters():
            own = {name.removeprefix(f"{key}."): tensor for name, tensor in state.items() if name.startswith(f"{key}.")}
            master = own.pop("master", None)
            if master is None or master.shape != parameter.shape:
                raise ValueError(
                    f"checkpoint does not fit this policy: {key} differs; resume with the same model and ranks"
                )
            parameter.copy_(master)
            # Copies: loaded tensors may be views of the checkpoint's file.
            self._adam.state[parameter] = {name: tensor.to(parameter.device, copy=True) for name, tensor in own.items()}
        for number, group in enumerate(self._adam.param_groups):
            if "step" in group:
                group["step"] = int(state[f"group{number}.step"])
        self._distributed._copy_main_params_to_model_params()
        self._ddp.start_param_sync(force_sync=True)

    def _main_parameters(self) -> list[tuple[str, Tensor]]:
        return [
            (f"group{number}.{position}", parameter)
            for number, group in enumerate(self._adam.param_groups)
            for position, parameter in enumerate(group["params"])
        ]
