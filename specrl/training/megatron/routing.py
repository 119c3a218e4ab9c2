"""Rollout routing replay: the policy trains with the experts that the engine chose (R3, arXiv 2510.11370).

Rounding makes the routers of engine and trainer choose different experts for some tokens, whose log-probs then differ
by far more than rounding explains. With replay, each token is routed to the experts with which it was sampled. Their
weights are recomputed from the trainer's own logits, so that gradients reach the router as without replay.

With or without replay, the routing disagreement compares the routers' own choice with the engine's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from specrl.training.batches import MicroBatch
from specrl.training.megatron.model import PolicyModel


@dataclass
class _Compared:
    """The tokens of one micro-batch with routes from the engine, and those for which this stage would differ."""

    known: Tensor
    """[tokens] bool: whether the engine computed the token. It never computes the last one of a sequence."""
    differs: Tensor
    """[tokens] uint8: 1 where a layer of this stage would route the token to other experts."""
    num_pairs: Tensor


@dataclass(frozen=True)
class _Recorded:
    """The engine's choices for the tokens of one micro-batch.

    With sequence parallelism, a rank's routers see a part of the row.
    """

    experts: Tensor
    """[tokens of this rank, layers of this stage, experts per token] uint8 or int16."""
    own: slice
    """The part of the row that this rank's routers see."""
    compared: _Compared


class RoutingReplay:
    """Takes part in the choice of every router of this rank's layers, in passes over micro-batches with routes."""

    def __init__(self, model: PolicyModel, *, replays: bool) -> None:
        """Attach to the routers of a model with experts; without `replays`, only compare the choices."""
        self._replays = replays
        self._num_layers: int = model.config.num_layers
        self._recomputes = model.config.recompute_granularity is not None
        self._parts = parallel_state.get_tensor_model_parallel_world_size() if model.config.sequence_parallel else 1
        self._layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        self._weight = model.decoder.layers[0].mlp.router.weight  # shows on which device the model is
        self._inside = self._trains = False
        self._current: _Recorded | None = None
        self._again: list[deque[_Recorded | None]] = [deque() for _ in self._layers]
        """For each layer, the micro-batches for which a backward pass will recompute it, in that order."""
        self._compared: list[_Compared] = []
        for place, layer in enumerate(model.decoder.layers):
            # Megatron's router calls this for its experts instead of its own `RouterReplay`.
            layer.mlp.router.router_replay = SimpleNamespace(get_replay_topk=partial(self._topk, place))

    @contextmanager
    def micro_batch(self, batch: MicroBatch, *, trains: bool) -> Iterator[None]:
        """Route the pass inside the block, and its recomputation, as the engine did for tokens with routes."""
        self._inside, self._trains, self._current = True, trains, self._recorded(batch)
        try:
            yield
        finally:
            self._inside = False
        if self._current is not None:
            self._compared.append(self._current.compared)
        self._current = None

    def end_pass(self) -> None:
        assert not any(self._again), "a layer was not computed again in the backward pass of every micro-batch"

    def clear(self) -> None:
        self._compared.clear()

    def disagreement(self) -> dict[str, float]:
        """The `mismatch/routing_...` metrics over the tokens of all ranks since the last call or `clear` (collective).

        They are empty if no token had routes.
        """
        compared, self._compared = self._compared, []
        nothing = torch.zeros(0, dtype=torch.uint8, device=self._weight.device)
        differs = torch.cat([nothing, *(batch.differs.flatten() for batch in compared)])
        zero = torch.zeros((), dtype=torch.float64, device=self._weight.device)
        pairs = sum((batch.num_pairs for batch in compared), zero)
        # Each stage has its own layers and, with sequence parallelism, each tensor-parallel rank its own tokens.
        groups = [parallel_state.get_pipeline_model_parallel_group()]
        if self._parts > 1:
            groups.append(parallel_state.get_tensor_model_parallel_group())
        for group in groups:
            dist.all_reduce(pairs, group=group)
            if len(differs):
                dist.all_reduce(differs, dist.ReduceOp.MAX, group=group)
        known = sum((batch.known.sum() for batch in compared), zero)
        sums = torch.stack([differs.sum(dtype=torch.float64), pairs, known])
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        different, different_pairs, total = sums.tolist()
        if not total:
            return {}
        return {
            "mismatch/routing_tokens": different / total,
            "mismatch/routing_layers": different_pairs / (total * self._num_layers),
        }

    def _recorded(self, batch: MicroBatch) -> _Recorded | None:
        if batch.routes is None:
            return None
        width, device = len(batch.tokens), batch.tokens.device
        like = batch.routes[0]
        experts = np.zeros((width, len(self._layers), like.shape[-1]), like.dtype)
        known = torch.zeros(width, dtype=torch.bool)
        places, layers = batch.places(), slice(self._layers[0], self._layers[-1] + 1)
        # A shared prompt gets the routes of its first response, which are written last.
        for row, routes in reversed(list(zip(places, batch.routes, strict=True))):
            place = row[: len(routes)]
            experts[place.numpy()] = routes[:, layers]
            known[place] = True
        part = width // self._parts
        first = parallel_state.get_tensor_model_parallel_rank() * part if self._parts > 1 else 0
        own = slice(first, first + part)
        compared = _Compared(
            known=known.to(device),
            differs=torch.zeros(width, dtype=torch.uint8, device=device),
            num_pairs=torch.zeros((), dtype=torch.float64, device=device),
        )
        return _Recorded(torch.from_numpy(experts[own]).to(device), own, compared)

    def _topk(
        self, place: int, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """The scores and the numbers of the experts of each token, [tokens, topk] each."""
        values, own = default(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = self._choose(place, own)
        return (values, own) if chosen is own else (scores.gather(1, chosen), chosen)

    def _choose(self, place: int, own: Tensor) -> Tensor:
        """The experts to use for a router's tokens, [tokens, experts per token], given its own choice."""
        if not self._inside:  # a layer is being recomputed
            recorded = self._again[place].popleft() if self._again[place] else None
            return own if recorded is None else self._merged(recorded, place, own)[0]
        if self._trains and self._recomputes:
            self._again[place].append(self._current)
        if self._current is None:
            return own
        chosen, differs = self._merged(self._current, place, own)
        compared = self._current.compared
        part = compared.differs[self._current.own]
        part |= differs.to(part.dtype)
        compared.num_pairs += differs.sum()
        return chosen

    @torch.no_grad()
    def _merged(self, recorded: _Recorded, place: int, own: Tensor) -> tuple[Tensor, Tensor]:
        """The experts to use, and for which tokens the engine's differ from the router's own: [tokens].

        Where both sets are equal, the router's order is kept, so that weights add up as without replay.
        """
        engine = recorded.experts[:, place].long()
        assert engine.shape == own.shape, (engine.shape, own.shape)
        known = recorded.compared.known[recorded.own]
        differs = (engine.sort(-1).values != own.sort(-1).values).any(-1) & known
        return (torch.where(differs[:, None], engine, own) if self._replays else own), differs
