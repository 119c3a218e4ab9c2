"""What a refit costs: the bytes that one GPU receives, the messages that bring them, seconds and memory.

The functions follow `training/megatron/export.py`, tensor by tensor; a test compares them with what ranks exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specrl.models.buckets import buckets
from specrl.models.shapes import ModelShape


@dataclass(frozen=True)
class Links:
    """How fast GPUs exchange weights, in bytes per second that one GPU receives."""

    network: float = 50e9  # an adapter of 400 Gbit/s for each GPU
    node: float = 450e9  # NVLink 4
    message_s: float = 50e-6  # of each message beside its bytes


@dataclass(frozen=True)
class Layout:
    """How the trainer's ranks share the model; each holds whole experts."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1


@dataclass(frozen=True)
class RefitCost:
    """What one GPU receives and holds, in bytes, while the policy's weights go to the engines."""

    stage_bytes: int  # from the other pipeline stages, as broadcasts
    rank_bytes: int  # from the other tensor-parallel or expert-parallel ranks, as gathers
    sent_bytes: int  # all broadcasts of the GPU's pipeline group, which come one after another
    messages: int
    peak_bytes: int  # beside the parameters and vLLM's own copy of a layer

    def seconds(self, links: Links, *, spans_nodes: bool) -> float:
        """Compute the time of all messages, with the stages of a pipeline on different nodes or all in one."""
        stages = self.sent_bytes / (links.network if spans_nodes else links.node)
        return stages + self.rank_bytes / links.node + self.messages * links.message_s


@dataclass(frozen=True)
class _Tensor:
    """One Hugging Face tensor, or those of the same name of several experts, whole."""

    size: int  # in bytes
    copies: int  # ranks that hold different parts of it: 1 where every rank holds the whole
    is_rows: bool = True  # whether the parts lie behind each other, so that gathering them makes no second copy

    @property
    def part(self) -> int:
        return self.size // self.copies


def refit_cost(shape: ModelShape, layout: Layout, *, element_size: int = 2, stage: int | None = None) -> RefitCost:
    """Count what a GPU receives and holds in one refit.

    Args:
        element_size: The bytes of one weight.
        stage: The pipeline stage of the GPU; by default the one that receives most.
    """
    held = [0] * layout.pipeline_parallel
    gathered = messages = peak = before = 0
    for holder, message in _messages(shape, layout, element_size):
        part = sum(tensor.part for tensor in message)
        shared = sum(tensor.size for tensor in message if tensor.copies > 1)
        held[holder] += part
        gathered += sum(tensor.size - tensor.part for tensor in message)
        messages += (layout.pipeline_parallel > 1) + (shared > 0)
        largest = max(tensor.size for tensor in message)
        peak = max(peak, before + part + shared)
        if len(message) > 1 or not message[0].is_rows:
            peak = max(peak, shared + largest + max(before, largest))
        before = largest
    own = min(held) if stage is None else held[stage]
    is_alone = layout.pipeline_parallel == 1
    return RefitCost(
        stage_bytes=sum(held) - own,
        rank_bytes=gathered,
        sent_bytes=0 if is_alone else sum(held),
        messages=messages,
        peak_bytes=peak,
    )


def _messages(shape: ModelShape, layout: Layout, element_size: int) -> Iterator[tuple[int, list[_Tensor]]]:
    per_stage = shape.num_layers // layout.pipeline_parallel
    last = layout.pipeline_parallel - 1
    ranks = layout.tensor_parallel
    vocabulary = -(-shape.vocab_size // ranks) * ranks * shape.hidden_size * element_size  # padded
    layer = [list(_dense_tensors(shape, ranks, element_size)), list(_expert_tensors(shape, layout, element_size))]
    yield 0, [_Tensor(vocabulary, ranks)]
    for index in range(shape.num_layers):
        for tensors in layer:
            for indices in buckets([tensor.size for tensor in tensors]):
                yield index // per_stage, [tensors[place] for place in indices]
    yield last, [_Tensor(shape.hidden_size * element_size, 1)]
    if not shape.tied:
        yield last, [_Tensor(vocabulary, ranks)]


def _dense_tensors(shape: ModelShape, ranks: int, element_size: int) -> Iterator[_Tensor]:
    hidden, queries, keys = shape.hidden_size * element_size, shape.query_size, shape.kv_size
    yield from [_Tensor(hidden, 1)] * 2
    yield from [_Tensor(rows * hidden, ranks) for rows in (queries, keys, keys)]
    if shape.family.qkv_bias:
        yield from [_Tensor(rows * element_size, ranks) for rows in (queries, keys, keys)]
    yield _Tensor(queries * hidden, ranks, is_rows=False)
    if shape.family.qk_norm:
        yield from [_Tensor(shape.head_dim * element_size, 1)] * 2
    if shape.num_experts:
        yield _Tensor(shape.num_experts * hidden, 1)
    else:
        yield from [_Tensor(shape.intermediate_size * hidden, ranks)] * 2
        yield _Tensor(shape.intermediate_size * hidden, ranks, is_rows=False)


def _expert_tensors(shape: ModelShape, layout: Layout, element_size: int) -> Iterator[_Tensor]:
    together = layout.expert_parallel
    size = together * shape.expert_size * shape.hidden_size * element_size
    yield from [_Tensor(size, together)] * (3 * shape.num_experts // together)
