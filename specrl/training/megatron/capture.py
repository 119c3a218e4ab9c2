"""Takes the drafter's features from the policy's own forward pass and brings them together over pipeline stages."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import specrl.training.megatron.cpu_shim  # noqa: F401  (must precede megatron)

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from specrl.training.batches import MicroBatch
from specrl.training.features import Features, FeatureSpec, Window
from specrl.training.megatron.model import HeadOutput, PolicyModel
from specrl.training.megatron.parallel import from_stage


class KeptRows:
    """The rows of a micro-batch whose features are kept, whole or cut to windows."""

    def __init__(
        self, batch: MicroBatch, windows: Mapping[int, Window] | None = None, owners: Container[int] = ()
    ) -> None:
        """Choose the rows.

        Args:
            windows: What is kept of each sequence, by its index; with None everything is kept on every rank.
            owners: The ranks whose rows are chosen.
        """
        self._batch = batch
        self.owners: list[int] | None = None
        """The rank that keeps each row; None where every rank keeps all of them, whole."""
        if windows is None:
            return
        named = ((row, windows.get(index)) for row, index in enumerate(batch.indices))
        chosen = [(row, window) for row, window in named if window is not None and window.owner in owners]
        self.owners = [window.owner for _, window in chosen]
        device = batch.tokens.device
        width = max((window.stop - window.start for _, window in chosen), default=0)
        self._rows = torch.tensor([row for row, _ in chosen], dtype=torch.int64, device=device)[:, None]
        self._starts = torch.tensor([window.start for _, window in chosen], dtype=torch.int64, device=device)
        stops = torch.tensor([window.stop for _, window in chosen], dtype=torch.int64, device=device)[:, None]
        columns = self._starts[:, None] + torch.arange(width, device=device)
        self._inside = columns < stops
        self._columns = columns.clamp(max=batch.tokens.shape[1] - 1)
        # The token behind the last column is outside of the window.
        self._mask = batch.mask[self._rows, self._columns] & (columns + 1 < stops)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._batch.tokens.shape[0] if self.owners is None else len(self.owners)

    @property
    def mask(self) -> Tensor:
        """The places of these rows that have targets, bool [rows, width]."""
        return self._batch.mask if self.owners is None else self._mask

    @property
    def tokens(self) -> Tensor:
        """The token ids, int64 [rows, width], 0 where a row is padded."""
        return self._batch.tokens if self.owners is None else self.cut(self._batch.tokens) * self._inside

    @property
    def starts(self) -> Tensor | None:
        """The position of each row's first token, int64 [rows]; None where all are 0."""
        return None if self.owners is None else self._starts

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the rows of a [batch, seq, ...] tensor, [rows, width, ...], copied unless they are all."""
        return tensor if self.owners is None else tensor[self._rows, self._columns]

    def places(self) -> Tensor:
        """Return where the targets are in the micro-batch, bool [batch, seq]."""
        if self.owners is None:
            return self._batch.mask
        places = torch.zeros_like(self._batch.mask)
        rows = self._rows.expand_as(self._mask)
        places[rows[self._mask], self._columns[self._mask]] = True
        return places


class LayerInputs:
    """Records, by micro-batch, the residual stream that enters those of the wanted layers that this stage holds.

    The index behind the last layer stands for what leaves that layer, and so enters the final norm. Nothing is
    recorded outside a micro-batch's forward pass, because recomputation in the backward pass runs the layers again.
    """

    def __init__(self, model: PolicyModel, layers: tuple[int, ...]) -> None:
        self.recorded: list[dict[int, Tensor]] = []
        """The inputs of each micro-batch: layer index to [rows, width, hidden] in the compute type."""
        self._current: dict[int, Tensor] | None = None
        self._kept: KeptRows | None = None
        self._sequence_parallel: bool = model.config.sequence_parallel
        readers = {layer.layer_number - 1: layer for layer in model.decoder.layers}
        if model.post_process:
            readers[model.config.num_layers] = model.decoder.final_layernorm
        self._hooks = [
            reader.register_forward_pre_hook(partial(self._record, index), with_kwargs=True)
            for index, reader in readers.items()
            if index in layers
        ]

    def _record(self, index: int, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._current is not None and self._kept is not None:
            hidden: Tensor = (args[0] if args else kwargs["hidden_states"]).detach()  # [seq, batch, hidden]
            if self._sequence_parallel:  # a part of the sequence on each tensor-parallel rank
                hidden = gather_from_sequence_parallel_region(hidden)
            self._current[index] = self._kept.cut(hidden.transpose(0, 1))

    @contextmanager
    def micro_batch(self, kept: KeptRows) -> Iterator[None]:
        """Record what happens inside the block as one micro-batch, appended to `recorded`.

        Args:
            kept: The rows to record.
        """
        self._current, self._kept = {}, kept
        yield
        self.recorded.append(self._current)
        self._current = self._kept = None

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()


@torch.no_grad()
def assemble(
    spec: FeatureSpec,
    kept: KeptRows,
    inputs: dict[int, Tensor],
    head: HeadOutput | None,
    *,
    model_rank: int,
    head_rows: Tensor | None,
    num_layers: int,
    hidden_size: int,
    dtype: torch.dtype,
) -> Features | None:
    """Return one micro-batch's features of this rank's own rows; all ranks of the pipeline group call it.

    Targets and top-1 are zero where the mask is False: the output layer is not evaluated there.

    Args:
        kept: The rows that were recorded on this tensor-parallel rank.
        inputs: The recorded layer inputs of this stage by layer index, [rows, width, hidden] each.
        head: The results of the output layer on the last stage; None on the others.
        model_rank: The number of this rank among those that hold the policy together.
        head_rows: The rows of the policy's head, where the targets are hidden states.
        num_layers: The number of transformer layers of the whole policy.
        hidden_size: The width of the residual stream.
        dtype: The compute type.

    Returns:
        None if no row belongs to this rank.
    """
    if not len(kept):
        return None
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    rows, width = kept.mask.shape
    hidden = [
        from_stage(min(layer * stages // num_layers, stages - 1), inputs.get(layer), (rows, width, hidden_size), dtype)
        for layer in spec.layers
    ]
    size = hidden_size if spec.as_hidden else len(spec.draft_tokens)
    targets = top1 = None
    if head is not None:
        assert head.targets is not None and head.top1 is not None
        targets = head.targets.new_zeros(rows, width, size)
        targets[kept.mask] = head.targets
        top1 = torch.zeros_like(kept.mask, dtype=torch.int64)
        top1[kept.mask] = head.top1
    features = Features(
        tokens=kept.tokens,
        mask=kept.mask,
        hidden=torch.cat(hidden, -1),
        targets=from_stage(stages - 1, targets, (rows, width, size), dtype),
        target_top1=from_stage(stages - 1, top1, (rows, width), torch.int64),
        head=head_rows,
        starts=kept.starts,
    )
    if kept.owners is None:
        return features
    own = [row for row, owner in enumerate(kept.owners) if owner == model_rank]
    return features.choose(own) if own else None
