"""Whether parallel sizes, lengths and the drafter of a configuration suit the shape of its model."""

from __future__ import annotations

from specrl.config import Config
from specrl.models.drafters import with_source_heads
from specrl.models.shapes import ModelShape

FP8_BLOCK = 128  # rows and columns of a block of weights with one scale
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # those that vLLM has CPU kernels for


def layout_problems(config: Config, shape: ModelShape) -> list[str]:
    """A line for everything that the configuration asks of the model and its shape does not allow."""
    source = config.model.source
    problems = []
    if config.model.max_length > shape.max_positions:
        length = config.model.max_length
        problems.append(f"model.max_length = {length}: {source} has only {shape.max_positions} positions")
    for key, parallel in (
        ("policy.tensor_parallel", config.policy.tensor_parallel),
        ("engine.tensor_parallel", config.engine.tensor_parallel),
    ):
        problems += _head_problems(key, parallel, shape, source)
    problems += _expert_problems(config, shape)
    if shape.num_layers % config.policy.pipeline_parallel:
        stages = config.policy.pipeline_parallel
        problems.append(
            f"policy.pipeline_parallel = {stages} does not divide the {shape.num_layers} layers of {source}"
        )
    problems += _head_size_problems(config, shape, source)
    method = config.speculation.draft_method
    if method.has_weights and not method.is_policy_layer:
        problems += _drafter_problems(config, shape)
    return problems


def _drafter_problems(config: Config, shape: ModelShape) -> list[str]:
    drafter, source, problems = config.drafter, config.model.source, []
    if drafter.draft_vocab_size > shape.vocab_size:
        size = drafter.draft_vocab_size
        problems.append(f"drafter.draft_vocab_size = {size} must be at most the {shape.vocab_size} tokens of {source}")
    if drafter.feature_layers and drafter.feature_layers[-1] > shape.num_layers:
        chosen = list(drafter.feature_layers)
        problems.append(f"drafter.feature_layers = {chosen} must be at most the {shape.num_layers} layers of {source}")
    if drafter.num_layers > shape.num_layers:
        own = f"drafter.num_layers = {drafter.num_layers}"
        problems.append(f"{own} must be at most the {shape.num_layers} layers of {source}")
    own_shape = with_source_heads(config, shape)
    if own_shape != shape:
        of = f"drafter.source = {drafter.source}"
        problems += _head_problems("engine.tensor_parallel", config.engine.tensor_parallel, own_shape, of)
        problems += _head_size_problems(config, own_shape, of)
    return problems


def _head_problems(key: str, parallel: int, shape: ModelShape, source: str) -> list[str]:
    if shape.heads_divide(parallel):
        return []
    heads = f"{shape.num_heads} attention and {shape.num_kv_heads} KV heads"
    return [f"{key} = {parallel} does not divide the {heads} of {source}"]


def _head_size_problems(config: Config, shape: ModelShape, source: str) -> list[str]:
    if config.resources_of("train").gpus_per_rank or shape.head_dim in CPU_HEAD_SIZES:
        return []
    allowed = ", ".join(map(str, CPU_HEAD_SIZES))
    return [f"{source} has heads of {shape.head_dim} channels; on CPUs vLLM allows {allowed}"]


def _expert_problems(config: Config, shape: ModelShape) -> list[str]:
    size, engine, source = config.policy.expert_parallel, config.engine.tensor_parallel, config.model.source
    problems = []
    if shape.num_experts and config.policy.lora is not None:
        problems.append(f"policy.lora: {source} has experts, which have no adapters here; leave policy.lora out")
    if not shape.num_experts and size > 1:
        problems.append(f"policy.expert_parallel = {size}: {source} has no experts; it must be 1")
    if shape.num_experts % size:
        experts = f"the {shape.num_experts} experts"
        problems.append(f"policy.expert_parallel = {size} does not divide {experts} of {source}")
    if config.precision.generation == "fp8" and shape.num_experts and shape.expert_size // engine % FP8_BLOCK:
        rows = f"the {shape.expert_size} rows of an expert of {source} in {engine} parts"
        problems.append(f"engine.tensor_parallel = {engine}: {rows} cut through FP8 blocks of {FP8_BLOCK}")
    return problems
