"""Whether parallel sizes, lengths and the drafter of a configuration suit the shape of its model."""

from __future__ import annotations

from collections.abc import Iterator

from specrl.config import Config
from specrl.models.drafters import with_source_heads
from specrl.models.shapes import ModelShape

FP8_BLOCK = 128  # rows and columns of a block of weights with one scale
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # those that vLLM has CPU kernels for


def layout_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Yield a line for everything that the configuration asks of the model and its shape does not allow."""
    source, policy, engine = config.model.source, config.policy, config.engine
    if config.model.max_length > shape.max_positions:
        yield f"model.max_length = {config.model.max_length}: {source} has only {shape.max_positions} positions"
    yield from _head_problems("policy.tensor_parallel", policy.tensor_parallel, shape, source)
    yield from _head_problems("engine.tensor_parallel", engine.tensor_parallel, shape, source)
    if shape.num_experts and policy.lora is not None:
        yield f"policy.lora: {source} has experts, which have no adapters here; leave policy.lora out"
    if not shape.num_experts and policy.expert_parallel > 1:
        yield f"policy.expert_parallel = {policy.expert_parallel}: {source} has no experts; it must be 1"
    if shape.num_experts % policy.expert_parallel:
        experts = f"the {shape.num_experts} experts"
        yield f"policy.expert_parallel = {policy.expert_parallel} does not divide {experts} of {source}"
    if config.precision.generation == "fp8" and shape.expert_size // engine.tensor_parallel % FP8_BLOCK:
        rows = f"the {shape.expert_size} rows of an expert of {source} in {engine.tensor_parallel} parts"
        yield f"engine.tensor_parallel = {engine.tensor_parallel}: {rows} cut through FP8 blocks of {FP8_BLOCK}"
    if shape.num_layers % policy.pipeline_parallel:
        layers = f"the {shape.num_layers} layers"
        yield f"policy.pipeline_parallel = {policy.pipeline_parallel} does not divide {layers} of {source}"
    yield from _head_size_problems(config, shape, source)
    method = config.speculation.draft_method
    if method.has_weights and not method.is_policy_layer:
        yield from _drafter_problems(config, shape)


def _drafter_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    drafter, source = config.drafter, config.model.source
    chosen, layers = list(drafter.feature_layers or ()), f"the {shape.num_layers} layers of {source}"
    if drafter.draft_vocab_size > shape.vocab_size:
        tokens = f"the {shape.vocab_size} tokens of {source}"
        yield f"drafter.draft_vocab_size = {drafter.draft_vocab_size} must be at most {tokens}"
    if max(chosen, default=0) > shape.num_layers:
        yield f"drafter.feature_layers = {chosen} must be at most {layers}"
    if drafter.num_layers > shape.num_layers:
        yield f"drafter.num_layers = {drafter.num_layers} must be at most {layers}"
    own_shape = with_source_heads(config, shape)
    if own_shape != shape:
        of = f"drafter.source = {drafter.source}"
        yield from _head_problems("engine.tensor_parallel", config.engine.tensor_parallel, own_shape, of)
        yield from _head_size_problems(config, own_shape, of)


def _head_problems(key: str, parallel: int, shape: ModelShape, source: str) -> Iterator[str]:
    if not shape.heads_divide(parallel):
        heads = f"{shape.num_heads} attention and {shape.num_kv_heads} KV heads"
        yield f"{key} = {parallel} does not divide the {heads} of {source}"


def _head_size_problems(config: Config, shape: ModelShape, source: str) -> Iterator[str]:
    if not config.resources_of("train").gpus_per_rank and shape.head_dim not in CPU_HEAD_SIZES:
        allowed = ", ".join(map(str, CPU_HEAD_SIZES))
        yield f"{source} has heads of {shape.head_dim} channels; on CPUs vLLM allows {allowed}"
