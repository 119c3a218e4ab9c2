from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from specrl.config import PolicyConfig
from specrl.training.megatron.model import check_supported
from specrl.training.megatron.weights import Parameter, WeightMap, join, part_of, weight_map

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS = [
    LlamaConfig(**SMALL, tie_word_embeddings=True),
    LlamaConfig(**SMALL, tie_word_embeddings=False),
    Qwen2Config(**SMALL, tie_word_embeddings=True),
    Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=False),
]


def shapes_on_disk(hf: LlamaConfig | Qwen2Config | Qwen3Config, names: tuple[str, ...]) -> list[tuple[int, ...]]:
    head = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    hidden, queries, keys = hf.hidden_size, hf.num_attention_heads * head, hf.num_key_value_heads * head
    known = {
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
        "o_proj.weight": (hidden, queries),
        "gate_proj.weight": (hf.intermediate_size, hidden),
        "up_proj.weight": (hf.intermediate_size, hidden),
        "down_proj.weight": (hidden, hf.intermediate_size),
        "embed_tokens.weight": (hf.vocab_size, hidden),
        "lm_head.weight": (hf.vocab_size, hidden),
        "q_norm.weight": (head,),
        "k_norm.weight": (head,),
    }
    return [known.get(".".join(name.split(".")[-2:]), known.get(name, (hidden,))) for name in names]


def make_map(hf: object, pipeline: int) -> WeightMap:
    return weight_map(hf, pipeline_parallel=pipeline, expert_parallel=1, transformer_engine=False)


def parts(parameter: Parameter, tensors: list[torch.Tensor], rank: int, size: int) -> list[torch.Tensor]:
    """What a tensor-parallel rank reads of the tensors on disk."""
    found = [part_of(parameter, tensor.shape, rank, size) for tensor in tensors]
    return [tensor.narrow(dim, start, stop - start) for tensor, (dim, start, stop) in zip(tensors, found, strict=True)]


@given(st.sampled_from(MODELS), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_merge_shard_unshard_unmerge_gives_the_same_bits(
    hf: LlamaConfig | Qwen2Config | Qwen3Config, tensor: int, pipeline: int
) -> None:
    weights = make_map(hf, pipeline)
    for parameter in weights.parameters:
        originals = [torch.randn(shape).bfloat16() for shape in shapes_on_disk(hf, parameter.hf)]
        assert parameter.shapes == tuple(tuple(original.shape) for original in originals)
        shards = [weights.merge(parameter, parts(parameter, originals, rank, tensor), tensor) for rank in range(tensor)]
        held = zip(*(weights.unmerge(parameter, shard, tensor) for shard in shards), strict=True)
        if parameter.split == "none":
            again = [of_ranks[0] for of_ranks in held]
        else:
            again = [join(weights, parameter, torch.stack(of_ranks)) for of_ranks in held]
        assert all(torch.equal(a, b) for a, b in zip(originals, again, strict=True)), parameter.name
        found = [tuple(part.shape) for part in weights.unmerge(parameter, shards[0], tensor)]
        assert found == parameter.part_shapes(tensor)


@given(st.sampled_from(MODELS), st.sampled_from([1, 2, 4]))
def test_every_tensor_of_the_checkpoint_is_exported_once(
    hf: LlamaConfig | Qwen2Config | Qwen3Config, pipeline: int
) -> None:
    names = [name for p in make_map(hf, pipeline).parameters if not p.is_copy for name in p.hf]
    assert len(names) == len(set(names))
    per_layer = {"llama": 9, "qwen2": 12, "qwen3": 11}[hf.model_type]
    assert len(names) == per_layer * hf.num_hidden_layers + 2 + (not hf.tie_word_embeddings)


def test_the_gate_and_up_rows_of_a_rank_belong_together() -> None:
    weights = make_map(MODELS[0], 1)
    fc1 = next(p for p in weights.parameters if p.split == "gate_up")
    gate, up = torch.zeros(96, 64), torch.ones(96, 64)
    first = weights.merge(fc1, parts(fc1, [gate, up], 0, 2), 2)
    assert torch.equal(first.mean(1), torch.cat((torch.zeros(48), torch.ones(48))))


@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3_ROPE,
        {**LLAMA3_ROPE, "high_freq_factor": 8.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64},
    ],
)
def test_rope_scaling_is_supported(rope: dict[str, object]) -> None:
    check_supported(LlamaConfig(**SMALL, rope_parameters=rope), PolicyConfig())


@pytest.mark.parametrize(
    ("config", "tensor", "pipeline", "message"),
    [
        (LlamaConfig(**SMALL, attention_bias=True), 1, 1, "attention_bias"),
        (LlamaConfig(**SMALL, hidden_act="gelu"), 1, 1, "hidden_act"),
        (
            LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            1,
            1,
            "rope",
        ),
        (Qwen2Config(**SMALL, use_sliding_window=True), 1, 1, "use_sliding_window"),
        (LlamaConfig(**SMALL), 8, 1, r"policy.tensor_parallel = 8 .* and 4 KV heads of the model"),
        (LlamaConfig(**SMALL), 1, 3, r"policy.pipeline_parallel = 3 .* the 4 layers of the model"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    config: LlamaConfig | Qwen2Config, tensor: int, pipeline: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_supported(config, PolicyConfig(tensor_parallel=tensor, pipeline_parallel=pipeline))
