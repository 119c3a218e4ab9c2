"""Whether a configuration's parallel sizes, lengths, drafter and teacher suit the shape of its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from specrl.config import Config, ConfigError, PolicyConfig
from specrl.config.base import prefixed
from specrl.models.checks.folder import check_model_folder, end_tokens, token_ids
from specrl.models.directory import read_model_config
from specrl.models.drafters import with_source_heads
from specrl.models.shapes import ModelShape, shape_of

FP8_BLOCK = 128  # rows and columns of a block of weights that shares one scale
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # those for which vLLM has CPU kernels


def layout_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Yield a line for every request of the configuration that the model's shape does not allow."""
    source, policy, engine = config.model.source, config.policy, config.engine
    if config.model.max_length > shape.max_positions:
        yield f"model.max_length = {config.model.max_length}: {source} has only {shape.max_positions} positions"
    yield from trainer_problems(policy, shape, source)
    yield from _head_problems("engine.tensor_parallel", engine.tensor_parallel, shape, source)
    if shape.num_experts and policy.lora is not None:
        yield f"policy.lora: {source} has experts, which have no adapters here; leave policy.lora out"
    yield from fp8_problems(config, shape, on_gpu=config.resources_of("train").gpus_per_rank > 0)
    yield from _head_size_problems(config, shape, source)
    method = config.speculation.draft_method
    if method.has_weights and not method.is_policy_layer:
        yield from _drafter_problems(config, shape)


def fp8_problems(config: Config, shape: ModelShape, *, on_gpu: bool) -> Iterator[str]:
    """Yield a line for FP8 blocks that a shard would cut, or that trainer and engine would cut differently."""
    source, precision = config.model.source, config.precision
    trainer, engine = config.policy.tensor_parallel, config.engine.tensor_parallel
    if precision.generation == "fp8" and shape.expert_size // engine % FP8_BLOCK:
        experts = f"the {shape.expert_size} rows of an expert of {source} in {engine} parts"
        yield f"engine.tensor_parallel = {engine}: {experts} cut through FP8 blocks of {FP8_BLOCK}"
    if precision.training == "bf16":
        return
    if on_gpu and shape.head_dim % FP8_BLOCK:
        # Transformer Engine's blocks of queries and keys would hold rows of several heads.
        yield (
            f'precision.training = "fp8" on a GPU: heads of {shape.head_dim} channels share blocks of {FP8_BLOCK} '
            "rows, and Megatron keeps queries, keys and values in another order than the engine; use a model whose "
            f'head_dim is a multiple of {FP8_BLOCK}, or precision.training = "bf16"'
        )
    if precision.generation == "bf16" or trainer == engine:
        return
    sizes = {"query": shape.query_size, "key and value": shape.kv_size}
    for name, rows in (sizes if shape.num_experts else sizes | {"MLP": shape.intermediate_size}).items():
        if cutting := [size for size in (trainer, engine) if size > 1 and rows // size % FP8_BLOCK]:
            yield (
                f"policy.tensor_parallel = {trainer} and engine.tensor_parallel = {engine} with FP8 in both: the "
                f"model's {rows} {name} rows in {cutting[0]} parts cut through blocks of {FP8_BLOCK}, so that the two "
                "would quantise differently; use equal sizes"
            )


def check_teacher(config: Config, policy_dir: Path | None) -> None:
    """Check that the model of `train.teacher`, if there is one, can score the policy's tokens on the trainer's ranks.

    Args:
        policy_dir: The policy's directory; None if it does not exist yet, so that tokens cannot be compared.
    """
    directory = config.train.teacher
    if directory is None:
        return
    with prefixed("train.teacher: "):
        teacher = check_model_folder(directory, config.model.max_length)
    problems = list(trainer_problems(config.policy, shape_of(teacher), "the teacher"))
    if policy_dir is not None:
        problems += _token_problems(directory, teacher["vocab_size"], policy_dir)
    if problems:
        raise ConfigError("\n".join(f"train.teacher = {directory}: {line}" for line in problems))


def teacher_doubts(config: Config, policy_dir: Path) -> list[str]:
    """A line if a model of `train.teacher` that `check_teacher` accepts ends its responses with other tokens."""
    directory = config.train.teacher
    if directory is None or not (own := end_tokens(directory)) or not (others := end_tokens(policy_dir) - own):
        return []
    return [
        f"train.teacher = {directory}: by its eos_token_id it ends responses with {sorted(own)}, and not with "
        f"{sorted(others)} as the policy does, which may unlearn to end; take a teacher that ends as the policy does"
    ]


def _token_problems(directory: Path, vocab_size: int, policy_dir: Path) -> Iterator[str]:
    # The teacher may have more tokens: sizes are padded, and later models of a family add special tokens.
    advice = "take a teacher that has the policy's tokenizer"
    of_teacher = {token: number for number, token in token_ids(directory)}
    others = ((number, token) for number, token in sorted(token_ids(policy_dir)) if of_teacher.get(token) != number)
    wanted = read_model_config(policy_dir)["vocab_size"]
    if (first := next(others, None)) is not None:
        number, token = first
        found = f"token {of_teacher[token]}" if token in of_teacher else "no token"
        yield f"token {number} of the policy, {token!r}, is {found} of the teacher; {advice}"
    elif vocab_size < wanted:
        yield f"its vocab_size = {vocab_size} is below the policy's, {wanted}; {advice}"


def trainer_problems(policy: PolicyConfig, shape: ModelShape, source: str) -> Iterator[str]:
    """Yield a line for each way in which the trainer cannot be laid out over ranks."""
    parts = policy.tensor_parallel
    # Unlike an engine, the trainer holds no copies of KV heads.
    yield from _head_problems("policy.tensor_parallel", parts, shape, source, copies=False)
    if not shape.num_experts and shape.intermediate_size % parts:
        width = f"intermediate_size = {shape.intermediate_size}"
        yield f"policy.tensor_parallel = {parts} does not divide {width} of {source}"
    if not shape.num_experts and policy.expert_parallel > 1:
        yield f"policy.expert_parallel = {policy.expert_parallel}: {source} has no experts; it must be 1"
    if shape.num_experts % policy.expert_parallel:
        experts = f"the {shape.num_experts} experts"
        yield f"policy.expert_parallel = {policy.expert_parallel} does not divide {experts} of {source}"
    if shape.num_layers % policy.pipeline_parallel:
        layers = f"the {shape.num_layers} layers"
        yield f"policy.pipeline_parallel = {policy.pipeline_parallel} does not divide {layers} of {source}"


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


def _head_problems(key: str, parallel: int, shape: ModelShape, source: str, *, copies: bool = True) -> Iterator[str]:
    if not shape.heads_divide(parallel) or (not copies and shape.num_kv_heads % parallel):
        heads = f"{shape.num_heads} attention and {shape.num_kv_heads} KV heads"
        yield f"{key} = {parallel} does not divide the {heads} of {source}"


def _head_size_problems(config: Config, shape: ModelShape, source: str) -> Iterator[str]:
    if not config.resources_of("train").gpus_per_rank and shape.head_dim not in CPU_HEAD_SIZES:
        allowed = ", ".join(map(str, CPU_HEAD_SIZES))
        yield f"{source} has heads of {shape.head_dim} channels; on CPUs vLLM allows {allowed}"
