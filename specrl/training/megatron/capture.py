"""Captures the drafter's features in the policy's own forward pass and gathers them over pipeline stages."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from specrl.training.batches import MicroBatch
from specrl.training.features import NOT_SAMPLED, Features, Window
from specrl.training.megatron.model import PolicyModel
from specrl.training.megatron.parallel import from_stage


class KeptRows:
    """The sequences of a micro-batch whose features are kept, whole or cut to windows, in padded rows."""

    def __init__(
        self, batch: MicroBatch, windows: Mapping[int, Window] | None = None, owners: Container[int] = ()
    ) -> None:
        """Choose the sequences of `owners`; if `windows` is None, every rank keeps everything."""
        self.owners: list[int] | None = None
        """The rank that keeps each row; None if every rank keeps all of them, whole."""
        lengths = batch.lengths.tolist()
        if windows is None:
            chosen = [(row, Window(0, length)) for row, length in enumerate(lengths)]
        else:
            named = ((row, windows.get(index)) for row, index in enumerate(batch.indices))
            chosen = [(row, window) for row, window in named if window is not None and window.owner in owners]
            self.owners = [window.owner for _, window in chosen]
        rows = torch.tensor([row for row, _ in chosen], dtype=torch.int64)[:, None]
        starts = torch.tensor([window.start for _, window in chosen], dtype=torch.int64)
        stops = torch.tensor([window.stop for _, window in chosen], dtype=torch.int64)[:, None]
        width = max((window.stop - window.start for _, window in chosen), default=0)
        columns = starts[:, None] + torch.arange(width)
        inside = columns < stops
        places = batch.places()
        # The output at a column predicts the next token, which must be in the response and in the window.
        response = columns - batch.prompt_lengths[rows] + 1
        mask = (response >= 0) & (columns + 1 < stops)
        firsts = batch.spans[:, 3].cumsum(0) - batch.spans[:, 3]
        token = (firsts[rows] + response)[mask]  # its number among the response tokens of the micro-batch
        sampled = batch.sampled[token]
        device = batch.tokens.device
        self.outputs = (batch.sampled.cumsum(0) - 1)[token[sampled]].to(device)
        """The indices of `MicroBatch.predictors` with targets in these rows, ascending int64 [n]."""
        self._places = places[rows, columns.clamp(max=max(places.shape[1] - 1, 0))].to(device)
        self.with_targets = mask.flatten().nonzero()[sampled, 0].to(device)
        """The True places of `mask` whose next token the policy sampled, int64 [n]."""
        self.mask = mask.to(device)
        """The places of these rows whose next token is in the response, bool [rows, width]."""
        self.tokens = batch.tokens[self._places] * inside.to(device)
        """The token ids, int64 [rows, width], 0 where a row is padded."""
        self.starts = starts.to(device)
        """The position of each row's first token, int64 [rows]."""

    def __len__(self) -> int:
        return len(self.mask)

    def cut(self, tensor: Tensor) -> Tensor:
        """A copy of the rows of a [tokens, ...] tensor, [rows, width, ...]; their padding has no meaning."""
        return tensor[self._places]


class LayerInputs:
    """Records, by micro-batch, the residual stream that enters the wanted layers on this stage.

    The index after the last layer stands for that layer's output, the input of the final norm. Nothing is recorded
    outside a micro-batch's forward pass, because recomputation in the backward pass runs the layers again.
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
            hidden: Tensor = (args[0] if args else kwargs["hidden_states"]).detach()  # [tokens, 1, hidden]
            if self._sequence_parallel:  # a part of the row on each tensor-parallel rank
                hidden = gather_from_sequence_parallel_region(hidden)
            self._current[index] = self._kept.cut(hidden[:, 0])

    @contextmanager
    def micro_batch(self, kept: KeptRows) -> Iterator[None]:
        """Record the rows to keep inside the block as one micro-batch, appended to `recorded`."""
        self._current, self._kept = {}, kept
        yield
        self.recorded.append(self._current)
        self._current = self._kept = None

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


@torch.no_grad()
def assemble(
    layers: tuple[int, ...],
    kept: KeptRows,
    inputs: dict[int, Tensor],
    top1: Tensor | None,
    hf: Any,
    model_rank: int,
    dtype: torch.dtype,
) -> Features | None:
    """One micro-batch's features of this rank's own rows, if any; the ranks of a pipeline call it together."""
    if not len(kept):
        return None
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    num_layers, hidden_size = hf.num_hidden_layers, hf.hidden_size
    rows, width = kept.mask.shape
    hidden = [
        from_stage(min(layer * stages // num_layers, stages - 1), inputs.get(layer), (rows, width, hidden_size), dtype)
        for layer in layers
    ]
    if top1 is not None:
        unsampled = kept.mask.flatten().long() * NOT_SAMPLED
        top1 = unsampled.index_copy_(0, kept.with_targets, top1).view(rows, width)
    features = Features(
        tokens=kept.tokens,
        mask=kept.mask,
        hidden=torch.cat(hidden, -1),
        target_top1=from_stage(stages - 1, top1, (rows, width), torch.int64),
        starts=kept.starts,
    )
    if kept.owners is None:
        return features
    own = [row for row, owner in enumerate(kept.owners) if owner == model_rank]
    return features.choose(own) if own else None
