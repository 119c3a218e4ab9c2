"""The bytes that a rank of the train stage receives in one RL step, item by item, and the seconds that they take.

Ring collectives are counted: of a tensor of n bytes over a group of g ranks, an all-gather or a reduce-scatter brings
(g - 1) / g n bytes to each rank, and an all-reduce twice that. Ranks are numbered as Megatron does: tensor-parallel
ranks are neighbours, data-parallel ones follow, and pipeline stages are farthest apart. A ring over several nodes
enters each node once for each of the group's ranks there, so that these share the bytes that come over the network;
what ranks send each other directly stays in the node where both are in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specrl.projection.exchange import exchange_cost
from specrl.projection.memory import FP32, GIB, Rank, step_rollouts
from specrl.projection.refit import refit_cost
from specrl.projection.speeds import GB, MESSAGE_S, Speeds


@dataclass(frozen=True)
class Transfer:
    """What one rank receives in a step for one purpose."""

    name: str
    inside_gib: float
    """The GiB from ranks of the same node."""
    network_gib: float
    """The GiB from ranks of other nodes."""
    how: str
    """The factors from which the size was computed, in words."""
    messages: int = 0
    """The number of messages, where they are so many that it counts."""

    def seconds(self, speeds: Speeds) -> float:
        """Return the seconds of the transfer, if nothing else goes on."""
        size = (self.inside_gib / speeds.inside + self.network_gib / speeds.network) * GIB / GB
        return size + self.messages * MESSAGE_S


@dataclass(frozen=True)
class Group:
    """A group of ranks that communicate with each other."""

    size: int
    stride: int
    """The distance between the numbers of neighbours."""
    ranks_per_node: int

    @property
    def in_node(self) -> int:
        """The number of its ranks on one node."""
        return min(self.size, max(1, self.ranks_per_node // self.stride))

    @property
    def share(self) -> float:
        """The share of a tensor that a rank receives in an all-gather or a reduce-scatter."""
        return (self.size - 1) / self.size

    def ring(self, name: str, size: float, how: str) -> Transfer:
        """Return a collective that brings `size` bytes to each rank around a ring."""
        across = size / self.in_node if self.in_node < self.size else 0.0
        return Transfer(name, (size - across) / GIB, across / GIB, how)

    def direct(self, name: str, size: float, how: str) -> Transfer:
        """Return an exchange in which each rank gets `size` bytes, as many from each of the others."""
        across = size * (self.size - self.in_node) / max(self.size - 1, 1)
        return Transfer(name, (size - across) / GIB, across / GIB, how)


def step_traffic(rank: Rank, speeds: Speeds) -> list[Transfer]:
    """Return what a rank of the train stage receives in one RL step; transfers without bytes are left out."""
    found = [
        *_gradients(rank),
        *_activations(rank, speeds),
        *_refit(rank),
        *_drafter(rank),
        _generation(rank, speeds),
        _exchange(rank, speeds),
    ]
    return [item for item in found if item.inside_gib + item.network_gib > 0]


def _group(rank: Rank, size: int, stride: int = 1) -> Group:
    return Group(size, stride, rank.config.resources_of("train").ranks_per_node)


def _gradients(rank: Rank) -> list[Transfer]:
    """Return the reduce-scatter of float32 gradients and the all-gather of new weights, in every update."""
    policy, size = rank.config.policy, rank.dtype_bytes
    data = _group(rank, rank.data_parallel, policy.tensor_parallel)
    experts = _group(rank, rank.expert_data_parallel, rank.expert_parallel)
    updates = rank.config.train.updates_per_step
    found = []
    for name, group, count in (
        ("gradients and new weights", data, rank.shared_parameters),
        ("the same of experts", experts, rank.expert_parameters),
    ):
        how = f"{count / 1e9:.2f} G parameters x ({FP32} + {size}) B, {group.size} data-parallel ranks"
        found.append(group.ring(name, updates * count * (FP32 + size) * group.share, how))
    return found


def _activations(rank: Rank, speeds: Speeds) -> list[Transfer]:
    """Return what tensor, expert and pipeline parallelism send in the passes of a step's updates.

    A layer has two all-reduces of the hidden states in its forward pass and two in its backward pass; recomputation
    repeats the forward pass. Experts get the tokens that chose them and send them back, in both passes.
    """
    shape, policy = rank.shape, rank.config.policy
    tokens = _tokens_of_step(rank, speeds) / rank.data_parallel
    hidden = tokens * shape.hidden_size * rank.dtype_bytes
    passes = 3 if policy.recompute else 2
    tensor = _group(rank, policy.tensor_parallel)
    experts = _group(rank, rank.expert_parallel)
    stages = _group(rank, policy.pipeline_parallel, policy.tensor_parallel * rank.data_parallel)
    chosen = shape.experts_per_token / policy.tensor_parallel
    words = f"{tokens:.0f} tokens x {shape.hidden_size} x {rank.dtype_bytes} B"
    return [
        tensor.ring(
            "tensor parallel",
            rank.layers * passes * 2 * 2 * hidden * tensor.share,
            f"{words} x {rank.layers} layers x {passes} passes x 2 all-reduces",
        ),
        experts.direct(
            "tokens to experts and back",
            rank.layers * passes * 2 * chosen * hidden * experts.share,
            f"{words} x {rank.layers} layers x {passes} passes x 2 x {chosen:g} experts per token",
        ),
        stages.direct(
            "pipeline", 2 * hidden if policy.pipeline_parallel > 1 else 0.0, f"{words}, activations and gradients"
        ),
    ]


def _refit(rank: Rank) -> list[Transfer]:
    """Return the policy's weights on their way into the engine: broadcasts over pipeline stages, then gathers."""
    cost, layout = refit_cost(rank.shape, rank.layout, element_size=rank.dtype_bytes), rank.layout
    stages = _group(rank, layout.pipeline_parallel, layout.tensor_parallel * rank.data_parallel)
    ranks = _group(rank, max(layout.tensor_parallel, layout.expert_parallel))
    size = f"{rank.shape.parameters / 1e9:.2f} G parameters x {rank.dtype_bytes} B"
    whole = f"{size}, made whole, in {cost.messages} messages"
    return [
        stages.ring("refit over pipeline stages", cost.stage_bytes, f"{size}, in parts, of the other stages"),
        replace(ranks.ring("refit over ranks of a stage", cost.rank_bytes, whole), messages=cost.messages),
    ]


def _drafter(rank: Rank) -> list[Transfer]:
    """Return the all-reduces of the drafter's float32 gradients in its update of a step, one for each micro-batch."""
    config = rank.config
    if not config.speculation.draft_method.has_weights:
        return []
    every = _group(rank, config.resources_of("train").ranks)
    steps = max(1, config.drafter.max_tokens_per_step // rank.longest_micro_batch)
    size = steps * 2 * FP32 * rank.drafter_parameters * every.share
    how = f"{rank.drafter_parameters / 1e6:.0f} M parameters x {FP32} B, {steps} all-reduces"
    return [every.ring("drafter's gradients", size, how)]


def _generation(rank: Rank, speeds: Speeds) -> Transfer:
    """Return the all-reduces of a tensor-parallel engine, two for each layer and computed token."""
    shape, size = rank.shape, rank.config.engine.tensor_parallel
    engine = _group(rank, size)
    tokens = _tokens_of_step(rank, speeds) * size / rank.config.resources_of("train").ranks
    hidden = tokens * shape.hidden_size * rank.dtype_bytes
    how = f"{tokens:.0f} tokens x {shape.num_layers} layers x 2 all-reduces; drafts that are refused come on top"
    return engine.ring("generation, tensor parallel", shape.num_layers * 2 * 2 * hidden * engine.share, how)


def _exchange(rank: Rank, speeds: Speeds) -> Transfer:
    """Return the rollouts that the first rank of an engine gets from others, and passes on to the others of its own."""
    every = _group(rank, rank.config.resources_of("train").ranks)
    shape = step_rollouts(rank, speeds.mean_tokens)
    how = f"{shape.rollouts} rollouts: numbers of all, tokens and log-probs of its own share"
    return every.direct("exchange of rollouts", exchange_cost(shape).received, how)


def _tokens_of_step(rank: Rank, speeds: Speeds) -> float:
    """Return the number of tokens, prompts included, of all rollouts of a step."""
    train = rank.config.train
    return train.prompts_per_step * train.samples_per_prompt * speeds.mean_tokens
