"""The last transformer layer, whose output is computed for those tokens alone that somebody reads.

The output layer reads the tokens of responses. Those of prompts, often the most, matter to the last layer's attention
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import specrl.training.megatron.cpu_shim  # noqa: F401  (must precede megatron)

# isort: split
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from specrl.training.gather import rows_of


class LastLayer(TransformerLayer):  # type: ignore[misc]
    """A transformer layer that leaves out the MLP of tokens whose output nobody reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keeps_whole = False
        """Whether forward passes keep `whole`; what they return stays the same, bit for bit."""
        self.whole: Tensor | None = None
        """The output of the last forward pass at all tokens, [tokens, 1, hidden], detached."""
        self._rows: Tensor | None = None

    @contextmanager
    def only(self, rows: Tensor) -> Iterator[None]:
        """Let forward passes inside the block return the outputs of some tokens, [len(rows), 1, hidden].

        Args:
            rows: [n] int64: the places of these tokens in the row, each once.
        """
        self._rows = rows
        try:
            yield
        finally:
            self._rows = self.whole = None

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._rows is None:
            whole: Tensor = super()._forward_mlp(hidden_states, *args, **kwargs)
            return whole
        output: Tensor = super()._forward_mlp(rows_of(hidden_states, self._rows), *args, **kwargs)
        if self.keeps_whole:
            self.whole = self._completed(hidden_states, output)
        return output

    @torch.no_grad()
    def _completed(self, hidden_states: Tensor, output: Tensor) -> Tensor:
        """Return `output` with the outputs of all other tokens, [tokens, 1, hidden]."""
        is_other = torch.ones(len(hidden_states), dtype=torch.bool, device=hidden_states.device)
        is_other[self._rows] = False
        whole = torch.empty_like(hidden_states)
        whole[self._rows] = output
        whole[is_other] = super()._forward_mlp(hidden_states[is_other])
        return whole
