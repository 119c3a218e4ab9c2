"""Takes the drafter's features from the policy's own forward pass and brings them together over pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import specrl.training.megatron.cpu_shim  # noqa: F401  (must precede megatron)

# isort: split
import torch
from megatron.core import parallel_state
from torch import Tensor

from specrl.training.batches import MicroBatch
from specrl.training.features import Features, FeatureSpec
from specrl.training.megatron.model import HeadOutput, PolicyModel
from specrl.training.megatron.parallel import from_stage


class LayerInputs:
    """Records, by micro-batch, the residual stream that enters those of the wanted layers that this stage holds.

    The index behind the last layer stands for what leaves that layer, and so enters the final norm. Nothing is
    recorded outside a micro-batch's forward pass, because recomputation in the backward pass runs the layers again.
    """

    def __init__(self, model: PolicyModel, layers: tuple[int, ...]) -> None:
        self.recorded: list[dict[int, Tensor]] = []
        """The inputs of each micro-batch: layer index to [batch, seq, hidden] in the compute type."""
        self._current: dict[int, Tensor] | None = None
        readers = {layer.layer_number - 1: layer for layer in model.decoder.layers}
        if model.post_process:
            readers[model.config.num_layers] = model.decoder.final_layernorm
        self._hooks = [
            reader.register_forward_pre_hook(partial(self._record, index), with_kwargs=True)
            for index, reader in readers.items()
            if index in layers
        ]

    def _record(self, index: int, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._current is not None:
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]  # [seq, batch, hidden]
            self._current[index] = hidden.detach().transpose(0, 1)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Record what happens inside the block as one micro-batch, appended to `recorded`."""
        self._current = {}
        yield
        self.recorded.append(self._current)
        self._current = None

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()


@torch.no_grad()
def assemble(
    spec: FeatureSpec,
    batch: MicroBatch,
    inputs: dict[int, Tensor],
    head: HeadOutput | None,
    *,
    num_layers: int,
    hidden_size: int,
    dtype: torch.dtype,
) -> Features:
    """Return one micro-batch's features on every pipeline stage; all ranks of the pipeline group call it.

    Logits and top-1 are zero where `batch.mask` is False: the output layer is not evaluated there.

    Args:
        inputs: The recorded layer inputs of this stage by layer index, [batch, seq, hidden] each.
        head: The results of the output layer on the last stage; None on the others.
        num_layers: The number of transformer layers of the whole policy.
        hidden_size: The width of the residual stream.
        dtype: The compute type.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    batch_shape = (batch.tokens.shape[0], batch.tokens.shape[1])
    hidden = [
        from_stage(min(layer * stages // num_layers, stages - 1), inputs.get(layer), (*batch_shape, hidden_size), dtype)
        for layer in spec.layers
    ]
    logits = top1 = None
    if head is not None:
        assert head.draft_logits is not None and head.top1 is not None
        logits = head.draft_logits.new_zeros(*batch_shape, len(spec.draft_tokens))
        logits[batch.mask] = head.draft_logits
        top1 = torch.zeros_like(batch.tokens)
        top1[batch.mask] = head.top1
    return Features(
        tokens=batch.tokens,
        mask=batch.mask,
        hidden=torch.cat(hidden, -1),
        target_logits=from_stage(stages - 1, logits, (*batch_shape, len(spec.draft_tokens)), dtype),
        target_top1=from_stage(stages - 1, top1, batch_shape, torch.int64),
    )
