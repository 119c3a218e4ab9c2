"""The section `communication` of `specrl bench gpu`, and the process of each of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specrl.bench.gpu.models import Row, Scale, microseconds, shipped
from specrl.bench.workers import Workers
from specrl.distributed import Ranks, gather_rows, join, leave
from specrl.processes import end_with_parent
from specrl.projection.traffic import INSIDE_GB_PER_S

TEXTS = "arrays of rollouts, through host memory"


class Exchange(NamedTuple):
    what: str
    received: float  # bytes that each rank receives
    work: Callable[[], object]


def measure(scale: Scale, folder: Path) -> Iterator[Row]:
    """Time what all GPUs send each other in an RL step of the shipped 8B configuration; with one GPU, yield no rows.

    A GPU receives `gb_per_s`, counted as in the plan, which expects `planned_gb_per_s` within a node.
    """
    if (count := torch.cuda.device_count() or 2) < 2:
        return
    with Workers(__name__, "communication", folder / "communication", count, 1, scale) as workers:
        for what in workers.answers()[0]:
            received, us = max(workers.tell(), key=lambda answer: float(answer[1]))
            row: Row = {"what": what, "ranks": count, "mib": received / 2**20, "us": us}
            row["gb_per_s"] = received / us / 1e3
            yield row | {"planned_gb_per_s": None if what == TEXTS else INSIDE_GB_PER_S}


def main(parent: Connection) -> None:
    """Time the exchanges in turn, each when the parent asks for it."""
    end_with_parent(parent.recv())
    scale, ranks = parent.recv(), join()
    made = exchanges(scale, ranks)
    parent.send([exchange.what for exchange in made])
    for exchange in made:
        parent.recv()
        parent.send((exchange.received, microseconds(exchange.work, scale)))
    leave()


def exchanges(scale: Scale, ranks: Ranks) -> list[Exchange]:
    """One message of each kind, of the size that it has in training."""
    config, count, hidden = shipped(scale), ranks.world_size, scale.stepped.hidden_size

    def new(size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.ones(size, dtype=dtype, device=ranks.device)

    part, fp32 = scale.stepped.intermediate_size * hidden // count, torch.float32  # of a matrix
    gather = partial(dist.all_gather_into_tensor, new(part * count), new(part))
    scatter = partial(dist.reduce_scatter_tensor, new(part, fp32), new(part * count, fp32))
    texts = np.ones((config.engine.max_num_seqs, config.sampling.max_response_tokens), np.float32)
    found = [
        Exchange("weights of a matrix, gathered", 2 * part * (count - 1), gather),
        Exchange("gradients of a matrix, scattered", 4 * part * (count - 1), scatter),
        Exchange(TEXTS, texts.nbytes * (count - 1), partial(gather_rows, ranks, texts)),
    ]
    for what, tokens in ("an update", config.policy.tokens_per_micro_batch), ("decoding", config.engine.max_num_seqs):
        size = 2 * 2 * tokens * hidden * (count - 1) / count
        found.append(Exchange(f"activations of {what}, summed", size, partial(dist.all_reduce, new(tokens * hidden))))
    return found
