"""The bytes that a rank of the train stage receives in one RL step, item by item, and the seconds that they take.

Ring collectives are counted: of a tensor of n bytes over a group of g ranks, an all-gather or a reduce-scatter brings
(g - 1) / g n bytes to each rank, and an all-reduce twice that. Ranks are numbered as Megatron does: tensor-parallel
ranks are neighbours, data-parallel ones follow, and pipeline stages are farthest apart. A ring over several nodes
enters each node once for each of the group's ranks there, so that these share the bytes that come over the network;
what ranks send each other directly stays in the node where both are in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specrl.config import Config
from specrl.projection.memory import FP32, GIB, PREGENERATED, Rank, rollout_bytes
from specrl.projection.refit import refit_cost

GB = 1e9
# The speeds that are assumed, in GB/s, without a GPU and with one.
INSIDE_GB_PER_S = {0: 3.0, 1: 300.0}  # between ranks of a node: gloo over loopback, or NVLink 4 at two thirds
NETWORK_GB_PER_S = {0: 1.0, 1: 40.0}  # for each rank: 10 Gb/s Ethernet, or an adapter of 400 Gb/s at four fifths
HOST_GB_PER_S = {0: 5.0, 1: 20.0}  # to a copy in host memory: PCIe 5 with pinned memory, shared by two
DISK_GB_PER_S = {0: 0.5, 1: 5.0}  # of all nodes together: a disk, or a parallel file system
MESSAGE_S = 50e-6
MEAN_FILL = 0.5  # the mean length of prompt and response together, as a share of `model.max_length`


@dataclass(frozen=True)
class Speeds:
    """The assumed speeds, in GB/s, the mean tokens of a prompt with its response, and what is assumed, in words."""

    inside: float
    network: float
    host: float
    disk: float
    mean_tokens: float
    lines: tuple[str, ...]

    @classmethod
    def of(cls, config: Config, gpu: int) -> Speeds:
        """Assume the speeds of a run whose train stage has GPUs (1) or not (0)."""
        network = config.cluster.network_gb_per_s or NETWORK_GB_PER_S[gpu]
        disk = config.cluster.disk_gb_per_s or DISK_GB_PER_S[gpu]
        inside, host, mean = INSIDE_GB_PER_S[gpu], HOST_GB_PER_S[gpu], MEAN_FILL * config.model.max_length
        lines = (
            f"{inside:g} GB/s between ranks of a node ({'NVLink' if gpu else 'loopback'})",
            f"{network:g} GB/s for each rank between nodes (cluster.network_gb_per_s)",
            f"{host:g} GB/s from a rank to host memory",
            f"{disk:g} GB/s to the disk of runs_dir, for all nodes together (cluster.disk_gb_per_s)",
            f"{MESSAGE_S * 1e6:g} us for each message of a refit",
            f"{mean:g} tokens of prompt and response on average, {MEAN_FILL:.0%} of model.max_length",
            f"{PREGENERATED:.0%} of the next step's tokens generated before it, where idle engines do that",
            "transfers are counted one after another, none of them hidden behind computation",
        )
        return cls(inside, network, host, disk, mean, lines)


@dataclass(frozen=True)
class Transfer:
    """What one rank receives in a step for one purpose, from ranks of its node and over the network."""

    name: str
    inside_gib: float
    network_gib: float
    how: str
    messages: int = 0  # where they are so many that it counts

    def seconds(self, speeds: Speeds) -> float:
        """Compute the time of the transfer, if nothing else goes on."""
        size = (self.inside_gib / speeds.inside + self.network_gib / speeds.network) * GIB / GB
        return size + self.messages * MESSAGE_S


@dataclass(frozen=True)
class Group:
    """A group of ranks that communicate; the numbers of neighbours differ by `stride`."""

    size: int
    stride: int
    ranks_per_node: int

    @property
    def in_node(self) -> int:
        """The number of its ranks on one node."""
        return min(self.size, max(1, self.ranks_per_node // self.stride))

    def ring(self, name: str, size: float, how: str) -> Transfer:
        """Bring each rank what it lacks of `size` bytes, around a ring."""
        return self.around(name, size * (self.size - 1) / self.size, how)

    def around(self, name: str, received: float, how: str, messages: int = 0) -> Transfer:
        """Bring each rank so many bytes around a ring."""
        across = received / self.in_node if self.in_node < self.size else 0.0
        return Transfer(name, (received - across) / GIB, across / GIB, how, messages)

    def direct(self, name: str, size: float, how: str) -> Transfer:
        """Bring each rank `size` bytes, as many from each of the others."""
        across = size * (self.size - self.in_node) / max(self.size - 1, 1)
        return Transfer(name, (size - across) / GIB, across / GIB, how)


def step_traffic(rank: Rank, speeds: Speeds) -> list[Transfer]:
    """List what a rank of the train stage receives in one RL step; transfers without bytes are left out."""
    train = rank.config.train
    tokens = train.prompts_per_step * train.samples_per_prompt * speeds.mean_tokens
    found = [*_gradients(rank), *_activations(rank, tokens), *_refit(rank), *_drafter(rank), _generation(rank, tokens)]
    every = _group(rank, rank.config.resources_of("train").ranks)
    how = f"{train.prompts_per_step * train.samples_per_prompt} rollouts, at most all tokens of its share"
    found.append(every.direct("exchange of rollouts", rollout_bytes(rank, speeds.mean_tokens)[0], how))
    return [item for item in found if item.inside_gib + item.network_gib > 0]


def _group(rank: Rank, size: int, stride: int = 1) -> Group:
    return Group(size, stride, rank.config.resources_of("train").ranks_per_node)


def _gradients(rank: Rank) -> Iterator[Transfer]:
    policy, size = rank.config.policy, rank.dtype_bytes
    data = _group(rank, rank.data_parallel, policy.tensor_parallel)
    experts = _group(rank, rank.expert_data_parallel, policy.expert_parallel)
    for name, group, count in (
        ("gradients and new weights", data, rank.shared_parameters),
        ("the same of experts", experts, rank.expert_parameters),
    ):
        how = f"{count / 1e9:.2f} G parameters x ({FP32} + {size}) B, {group.size} data-parallel ranks"
        yield group.ring(name, rank.config.train.updates_per_step * count * (FP32 + size), how)


def _activations(rank: Rank, step_tokens: float) -> Iterator[Transfer]:
    """List what tensor, expert and pipeline parallelism send in the passes of a step's updates.

    A layer has two all-reduces of the hidden states in its forward pass and two in its backward pass; recomputation
    repeats the forward pass. Experts get the tokens that chose them and send them back, in both passes.
    """
    shape, policy = rank.shape, rank.config.policy
    tokens = step_tokens / rank.data_parallel
    hidden = tokens * shape.hidden_size * rank.dtype_bytes
    passes = 3 if policy.recompute else 2
    chosen = shape.experts_per_token / policy.tensor_parallel
    words = f"{tokens:.0f} tokens x {shape.hidden_size} x {rank.dtype_bytes} B"
    times = f"{words} x {rank.layers} layers x {passes} passes x 2"
    sent = rank.layers * passes * 2 * hidden
    yield _group(rank, policy.tensor_parallel).ring("tensor parallel", 2 * sent, f"{times} all-reduces")
    experts, away = _group(rank, policy.expert_parallel), 1 - 1 / policy.expert_parallel
    yield experts.direct("tokens to experts and back", sent * chosen * away, f"{times} x {chosen:g} experts per token")
    stages = _group(rank, policy.pipeline_parallel, policy.tensor_parallel * rank.data_parallel)
    yield stages.direct("pipeline", 2 * hidden if stages.size > 1 else 0.0, f"{words}, activations and gradients")


def _refit(rank: Rank) -> Iterator[Transfer]:
    """List the policy's weights on their way into the engine: broadcasts over pipeline stages, then gathers."""
    cost, layout = refit_cost(rank.shape, rank.layout, element_size=rank.dtype_bytes), rank.layout
    stages = _group(rank, layout.pipeline_parallel, layout.tensor_parallel * rank.data_parallel)
    ranks = _group(rank, max(layout.tensor_parallel, layout.expert_parallel))
    size = f"{rank.shape.parameters / 1e9:.2f} G parameters x {rank.dtype_bytes} B"
    whole = f"{size}, made whole, in {cost.messages} messages"
    yield stages.around("refit over pipeline stages", cost.stage_bytes, f"{size}, in parts, of the other stages")
    yield ranks.around("refit over ranks of a stage", cost.rank_bytes, whole, cost.messages)


def _drafter(rank: Rank) -> Iterator[Transfer]:
    """List the all-reduces of the drafter's float32 gradients in its update of a step, one for each micro-batch."""
    config = rank.config
    if config.speculation.draft_method.has_weights:
        every = _group(rank, config.resources_of("train").ranks)
        steps = max(1, config.drafter.max_tokens_per_step // rank.longest_micro_batch)
        how = f"{rank.drafter_parameters / 1e6:.0f} M parameters x {FP32} B, {steps} all-reduces"
        yield every.ring("drafter's gradients", steps * 2 * FP32 * rank.drafter_parameters, how)


def _generation(rank: Rank, step_tokens: float) -> Transfer:
    """Count the all-reduces of a tensor-parallel engine, two for each layer and computed token."""
    shape, size = rank.shape, rank.config.engine.tensor_parallel
    tokens = step_tokens * size / rank.config.resources_of("train").ranks
    hidden = tokens * shape.hidden_size * rank.dtype_bytes
    how = f"{tokens:.0f} tokens x {shape.num_layers} layers x 2 all-reduces; drafts that are refused come on top"
    return _group(rank, size).ring("generation, tensor parallel", shape.num_layers * 2 * 2 * hidden, how)
