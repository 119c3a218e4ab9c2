"""The bytes that a rank of the train stage receives in one RL step on GPUs, and the seconds this takes.

Ring collectives are assumed: for a tensor of n bytes and a group of g ranks, each rank receives (g - 1) / g n bytes in
an all-gather or a reduce-scatter, and twice that in an all-reduce. Ranks are numbered as in Megatron: tensor-parallel
ranks are adjacent, data-parallel ones follow, and pipeline stages are farthest apart. A group's ranks on one node share
the bytes that a ring over several nodes receives from the network; point-to-point messages between ranks of one node
stay inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specrl.config import Config, PolicyConfig
from specrl.models.shapes import ModelShape
from specrl.projection.memory import FP32, GIB, Rank, vocabulary_bytes

GB = 1e9
INSIDE_GB_PER_S = 300.0  # between ranks of a node: two thirds of NVLink 4
HOST_GB_PER_S = 20.0  # to host memory: PCIe 5 with pinned memory, shared by two ranks
MEAN_FILL = 0.5  # mean length of prompt plus response, as a fraction of `model.max_length`


@dataclass(frozen=True)
class Transfer:
    """What one rank receives per step for one purpose, from ranks of its node and over the network."""

    name: str
    inside_gib: float
    network_gib: float
    seconds: float  # if nothing else runs
    how: str


def assumptions(config: Config) -> tuple[str, ...]:
    """List the speeds and lengths assumed for transfers and checkpoints."""
    mean, cluster = MEAN_FILL * config.model.max_length, config.cluster
    return (
        f"{INSIDE_GB_PER_S:g} GB/s between ranks of a node (NVLink)",
        f"{cluster.network_gb_per_s:g} GB/s for each rank between nodes (cluster.network_gb_per_s)",
        f"{HOST_GB_PER_S:g} GB/s from a rank to host memory",
        f"{cluster.disk_gb_per_s:g} GB/s to the disk of runs_dir, for all nodes together (cluster.disk_gb_per_s)",
        f"{mean:g} tokens of prompt and response on average, {MEAN_FILL:.0%} of model.max_length",
        "transfers happen one after another and do not overlap with computation",
    )


def step_traffic(rank: Rank) -> list[Transfer]:
    """List what a rank of the train stage receives in one RL step; empty transfers are left out."""
    found = (*_weights(rank), *_activations(rank))
    return [item for item in found if item.inside_gib + item.network_gib > 0]


def _transfer(
    rank: Rank, name: str, received: float, how: str, group: int, stride: int = 1, *, direct: bool = False
) -> Transfer:
    """Divide what a rank receives from a group whose neighbouring ranks differ by `stride` in number."""
    in_node = min(group, max(1, rank.config.resources_of("train").ranks_per_node // stride))
    if direct:
        across = received * (group - in_node) / max(group - 1, 1)
    else:
        across = received / in_node if in_node < group else 0.0
    seconds = (received - across) / GB / INSIDE_GB_PER_S + across / GB / rank.config.cluster.network_gb_per_s
    return Transfer(name, (received - across) / GIB, across / GIB, seconds, how)


def _weights(rank: Rank) -> Iterator[Transfer]:
    """List gradients and new weights of policy and drafter, and the refit of the engine."""
    config, policy, size = rank.config, rank.config.policy, rank.dtype_bytes
    tensor, expert, ranks = policy.tensor_parallel, policy.expert_parallel, config.resources_of("train").ranks
    for name, count, group, stride in (
        ("gradients and new weights", rank.adapter_parameters or rank.shared_parameters, rank.data_parallel, tensor),
        ("the same of experts", rank.expert_parameters, rank.expert_data_parallel, expert),
    ):
        how = f"{count / 1e9:.2f} G parameters x ({FP32} + {size}) B, {group} data-parallel ranks"
        received = config.train.updates_per_step * count * (FP32 + size) * (group - 1) / group
        yield _transfer(rank, name, received, how, group, stride)
    cost, stages = refit_cost(rank.shape, policy, element_size=size), policy.pipeline_parallel
    how, stride = f"{rank.shape.parameters / 1e9:.2f} G parameters x {size} B", tensor * rank.data_parallel
    parts, whole = f"{how}, in parts, of the other stages", f"{how}, made whole"
    yield _transfer(rank, "refit over pipeline stages", cost.stage_bytes, parts, stages, stride)
    yield _transfer(rank, "refit over ranks of a stage", cost.rank_bytes, whole, max(tensor, expert))
    if config.speculation.draft_method.has_weights:  # one all-reduce per micro-batch of its update
        steps = max(1, config.drafter.max_tokens_per_step // rank.longest_micro_batch)
        how = f"{rank.drafter_parameters / 1e6:.0f} M parameters x {FP32} B, {steps} all-reduces"
        received = steps * 2 * FP32 * rank.drafter_parameters * (ranks - 1) / ranks
        yield _transfer(rank, "drafter's gradients", received, how, ranks)


def _activations(rank: Rank) -> Iterator[Transfer]:
    """List what the passes of a step's updates and a tensor-parallel engine send.

    A layer performs two all-reduces of the hidden states in its forward pass and two in its backward pass;
    recomputation repeats the forward pass. In both passes, tokens travel to their experts and back. The engine performs
    two all-reduces per layer and computed token.
    """
    shape, config, policy = rank.shape, rank.config, rank.config.policy
    tensor, stages, experts = policy.tensor_parallel, policy.pipeline_parallel, policy.expert_parallel
    all_tokens = config.train.prompts_per_step * config.train.samples_per_prompt * MEAN_FILL * config.model.max_length
    tokens, numbers = all_tokens / rank.data_parallel, shape.hidden_size * rank.dtype_bytes
    passes, chosen = 3 if config.policy.recompute else 2, shape.experts_per_token / tensor
    words = f"{tokens:.0f} tokens x {shape.hidden_size} x {rank.dtype_bytes} B"
    times = f"{words} x {rank.layers} layers x {passes} passes x 2"
    sent = rank.layers * passes * 2 * tokens * numbers
    yield _transfer(rank, "tensor parallel", 2 * sent * (tensor - 1) / tensor, f"{times} all-reduces", tensor)
    name, how = "tokens to experts and back", f"{times} x {chosen:g} experts per token"
    yield _transfer(rank, name, sent * chosen * (experts - 1) / experts, how, experts, direct=True)
    received, how = 2 * tokens * numbers if stages > 1 else 0.0, f"{words}, activations and gradients"
    yield _transfer(rank, "pipeline", received, how, stages, tensor * rank.data_parallel, direct=True)
    engine = config.engine.tensor_parallel
    tokens = all_tokens * engine / config.resources_of("train").ranks
    how = f"{tokens:.0f} tokens x {shape.num_layers} layers x 2 all-reduces; drafts that are refused come on top"
    received = shape.num_layers * 2 * 2 * tokens * numbers * (engine - 1) / engine
    yield _transfer(rank, "generation, tensor parallel", received, how, engine)


@dataclass(frozen=True)
class RefitCost:
    """The bytes that one GPU receives while the policy's weights go to the engines."""

    stage_bytes: int  # from other pipeline stages, by broadcast
    rank_bytes: int  # from other tensor-parallel or expert-parallel ranks, by gather
    sent_bytes: int  # all broadcasts of the GPU's pipeline group, which run one after another

    def seconds(self, *, between_stages: float, inside: float) -> float:
        """The seconds at these bandwidths (bytes per second) between pipeline stages and inside each."""
        return self.sent_bytes / between_stages + self.rank_bytes / inside


def refit_cost(
    shape: ModelShape, policy: PolicyConfig, *, element_size: int = 2, stage: int | None = None
) -> RefitCost:
    """Count what a GPU receives in one refit, for ranks laid out as `policy` says, each with whole experts.

    Args:
        element_size: The bytes of one weight.
        stage: The GPU's pipeline stage; by default the one that receives the most.
    """
    tensor, stages, expert = policy.tensor_parallel, policy.pipeline_parallel, policy.expert_parallel
    # Every tensor-parallel rank holds the norms and the router whole.
    copied = 2 * shape.hidden_size + (2 * shape.head_dim if shape.family.qk_norm else 0)
    copied = (copied + shape.num_experts * shape.hidden_size) * element_size
    experts = shape.expert_parameters_per_layer * element_size
    shared = shape.parameters_per_layer * element_size - copied - experts
    vocabulary, norm = vocabulary_bytes(shape, policy, element_size), shape.hidden_size * element_size
    held = [shape.num_layers // stages * (copied + shared // tensor + experts // expert)] * stages
    held[0] += vocabulary // tensor
    held[-1] += norm + (0 if shape.tied else vocabulary // tensor)
    whole = shape.num_layers * (copied + shared + experts) + norm + vocabulary * (1 if shape.tied else 2)
    own = min(held) if stage is None else held[stage]
    return RefitCost(sum(held) - own, whole - sum(held), sum(held) if stages > 1 else 0)
