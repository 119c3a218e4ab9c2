"""What the start of a training job takes of each rank: groups, connections, and weights that are read.

    python -m specrl.projection.start_up --ranks 512 --tensor-parallel 8 --pipeline-parallel 4 --gigabytes 470

A test compares the figures with what eight ranks count.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

from specrl.projection.refit import Layout
from specrl.report.tables import print_table


@dataclass(frozen=True)
class StartUp:
    """What the start of the trainer takes of rank 0, which is in as many groups as any other."""

    groups: int
    """The number of groups that the rank is in, the one of all ranks included."""
    pairs: int
    """The connections that gloo would make for them at once: one to each other rank of each group."""
    bytes_read: int
    """The bytes of weights that the rank reads; the other data-parallel ranks with the same part read none."""
    bytes_all: int
    """The bytes of weights that all ranks read together."""


def start_up(ranks: int, layout: Layout, model_bytes: int, expert_bytes: int = 0) -> StartUp:
    """Return what the start of the trainer takes.

    Args:
        ranks: The number of ranks of the job.
        model_bytes: The bytes of the policy's weights.
        expert_bytes: Those of its experts, which are among them.
    """
    found = set(rank_groups(ranks, layout))
    dense = (model_bytes - expert_bytes) // layout.tensor_parallel
    experts = expert_bytes // layout.expert_parallel
    return StartUp(
        groups=len(found) + 1,  # the group that the process joins at first
        pairs=sum(len(group) - 1 for group in found) + ranks - 1,
        bytes_read=(dense + experts) // layout.pipeline_parallel,
        bytes_all=model_bytes,
    )


def rank_groups(ranks: int, layout: Layout) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of each group that Megatron makes for rank 0, once for each purpose of ours.

    Ranks count through tensor-parallel ranks first, then through data-parallel ranks, then through stages.
    """
    tensor, stages, experts = layout.tensor_parallel, layout.pipeline_parallel, layout.expert_parallel
    stage = ranks // stages
    heads = range(0, ranks, stage)  # the first rank of each stage
    yield (0,)
    yield tuple(range(tensor))
    yield tuple(range(0, stage, tensor))  # data parallel
    yield tuple(heads)
    yield (0, heads[-1]) if stages > 1 else (0,)  # embeddings and head
    yield tuple(head + rank for head in heads for rank in range(tensor))
    yield tuple(range(stage))
    yield tuple(range(experts))
    yield tuple(range(0, stage, experts))
    yield tuple(head + rank for head in heads for rank in range(experts))
    yield tuple(range(ranks))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Print what the start of a training job takes of each rank.")
    parser.add_argument("--ranks", type=int, required=True, help="the number of ranks of the job")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="policy.tensor_parallel")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="policy.pipeline_parallel")
    parser.add_argument("--expert-parallel", type=int, default=1, help="policy.expert_parallel")
    parser.add_argument("--gigabytes", type=float, required=True, help="the size of the policy's weights")
    parser.add_argument("--expert-gigabytes", type=float, default=0.0, help="the size of its experts among them")
    given = parser.parse_args()
    layout = Layout(given.tensor_parallel, given.pipeline_parallel, given.expert_parallel)
    cost = start_up(given.ranks, layout, int(given.gigabytes * 1e9), int(given.expert_gigabytes * 1e9))
    replicas = given.ranks // (given.tensor_parallel * given.pipeline_parallel)
    rows = [
        ("groups of rank 0", str(cost.groups)),
        ("connections at once, if gloo made all", str(cost.pairs)),
        ("weights read by a rank of the first replica", f"{cost.bytes_read / 1e9:.1f} GB"),
        ("weights read by all ranks", f"{cost.bytes_all / 1e9:.0f} GB"),
        ("the same, if each replica read its own", f"{replicas * cost.bytes_all / 1e9:.0f} GB"),
    ]
    print_table(Console(), f"Start of the trainer on {given.ranks} ranks", ("", ">each"), rows)


if __name__ == "__main__":
    main()
