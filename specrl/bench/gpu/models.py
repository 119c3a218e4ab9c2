"""The random models of `specrl bench gpu`, and their sizes on a GPU and on a CPU. None comes from a network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from specrl.config import Config, DrafterConfig
from specrl.distributed import Ranks
from specrl.models.directory import WEIGHTS_FILE
from specrl.models.families import FAMILIES
from specrl.models.hf_io import write_tensors
from specrl.models.shapes import TINY_VOCAB_SIZE, ModelShape
from specrl.models.tiny import character_tokenizer
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features

LIKELY = "acegikmoqs"
"""The characters that the sharp policy likes, so that even a drafter of a few seconds is often right."""
COMMON_CHANNEL, DISLIKE, SLOPE = 3.0, -3.0, -0.4
"""The first channel of all embeddings, and what the head makes of it: little for most characters, and for each likely
one a bit less than for the one before."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder of the Qwen3 family."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def planned(self, max_length: int) -> ModelShape:
        """Return the shape as the memory plan reads it."""
        return ModelShape(
            family=FAMILIES["qwen3"],
            num_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            tied=False,
            max_positions=max_length,
        )

    def hf_config(self, max_length: int) -> Qwen3Config:
        """Return transformers' configuration."""
        return Qwen3Config(
            architectures=["Qwen3ForCausalLM"],
            dtype="bfloat16",
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=max_length,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )


@dataclass(frozen=True)
class Scale:
    """The sizes of everything that is measured."""

    name: str
    served: Shape
    """The policy whose generation is timed, with dummy weights."""
    draft_vocab: int
    trained: Shape
    """The policy that is trained for a few steps."""
    sequences: int
    """The number of sequences of a training step."""
    length: int
    """The length of a sequence, in tokens."""
    batches: tuple[int, ...]
    """The running batches of the generation."""
    new_tokens: int
    """The length of a response."""
    repeats: int
    """The number of timed repetitions."""


FULL = Scale(
    name="full",
    served=Shape(4096, 12288, 36, 32, 8, 128, 151936),
    draft_vocab=32000,
    trained=Shape(2048, 6144, 28, 16, 8, 128, 32768),
    sequences=16,
    length=2048,
    batches=(1, 8, 32, 128),
    new_tokens=128,
    repeats=3,
)
TINY = Scale(
    name="tiny",
    served=Shape(128, 256, 6, 4, 2, 32, 1024),
    draft_vocab=256,
    trained=Shape(128, 256, 2, 2, 1, 64, TINY_VOCAB_SIZE),
    sequences=4,
    length=48,
    batches=(1, 4),
    new_tokens=12,
    repeats=1,
)


def scale_of(*, tiny: bool) -> Scale:
    """Return the scale of this machine: tiny where it was asked for or where there is no GPU."""
    return TINY if tiny or not torch.cuda.is_available() else FULL


def bench_config(source: Path, max_length: int, **sections: dict[str, Any]) -> Config:
    """Return a run's configuration for a model in a directory."""
    gpus = int(torch.cuda.is_available())
    gib = torch.cuda.mem_get_info()[1] / 2**30 if gpus else 80.0
    return Config.model_validate(
        {
            "name": "bench-gpu",
            "model": {"source": str(source), "max_length": max_length, **sections.pop("model", {})},
            "sampling": {"max_response_tokens": max_length // 2},
            "resources": {"gpus_per_rank": gpus, "ranks_per_node": 1, "gpu_memory_gib": gib},
            **sections,
        }
    )


def write_config(shape: Shape, max_length: int, directory: Path) -> Path:
    """Write a model's directory without weights, for engines that make up their own; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    shape.hf_config(max_length).save_pretrained(directory)
    character_tokenizer(max_length).save_pretrained(directory)
    return directory


def write_random_drafter(shape: Shape, draft_vocab: int, directory: Path) -> Path:
    """Write a random EAGLE-3 drafter in BF16; return its directory.

    It needs weights, because vLLM lets a drafter without any share the policy's head.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = _drafter_sizes(shape, draft_vocab)
    weights = {name: (torch.randn(size, generator=generator) * 0.02).bfloat16() for name, size in sizes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(shape.hidden, dtype=torch.bfloat16) for name in norms}
    drafted = torch.arange(shape.vocab) < draft_vocab
    weights |= {"d2t": torch.zeros(draft_vocab, dtype=torch.int64), "t2d": drafted}
    write_tensors(directory / WEIGHTS_FILE, weights)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab,
        "draft_vocab_size": draft_vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, shape.layers // 2, shape.layers - 2],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _drafter_sizes(shape: Shape, draft_vocab: int) -> dict[str, tuple[int, int]]:
    """Return the shapes [out, in] of an EAGLE-3 drafter's matrices by their names on disk."""
    hidden, query, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.mlp.gate_proj.weight": (shape.intermediate, hidden),
        "midlayer.mlp.up_proj.weight": (shape.intermediate, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, shape.intermediate),
        "lm_head.weight": (draft_vocab, hidden),
    }


def write_random(shape: Shape, max_length: int, directory: Path) -> Path:
    """Write a random policy in BF16; return its directory."""
    if not (directory / "config.json").is_file():
        with torch.random.fork_rng(devices=[]), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            torch.manual_seed(0)
            weights = Qwen3ForCausalLM(shape.hf_config(max_length)).state_dict()
        write_tensors(directory / WEIGHTS_FILE, {name: weight.bfloat16().cpu() for name, weight in weights.items()})
        write_config(shape, max_length, directory)
    return directory


def write_sharp(directory: Path, dtype: str, max_length: int) -> Path:
    """Write a small random policy with few likely tokens, in `dtype`; return its directory."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = {name: weight.detach().clone() for name, weight in LlamaForCausalLM(config).state_dict().items()}
    embeddings, head, likely = weights["model.embed_tokens.weight"], weights["lm_head.weight"], likely_tokens()
    embeddings.mul_(10)[:, 0] = COMMON_CHANNEL
    head.mul_(2)[:, 0] = DISLIKE
    head[likely, 0] = SLOPE * torch.arange(len(likely))
    write_tensors(
        directory / WEIGHTS_FILE, {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
    )
    config.save_pretrained(directory)
    character_tokenizer(max_length).save_pretrained(directory)
    return directory


def write_drafter(directory: Path, policy_dir: Path) -> Path:
    """Write an EAGLE-3 drafter over the likely tokens, taught by responses of the sharp policy; return its directory.

    It is trained on the CPU, in FP32, within seconds.
    """
    generator, likely = torch.Generator().manual_seed(0), torch.tensor(likely_tokens())
    drafter = Drafter.create(policy_dir, DrafterConfig(lr=3e-3), likely, Ranks(0, 1, 0, torch.device("cpu")))
    policy = LlamaForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    tokens = likely[torch.randint(len(likely), (128, 6), generator=generator)]
    with torch.no_grad():
        for _ in range(12):
            probabilities = policy(tokens).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, probabilities.multinomial(1, generator=generator)], 1)
        outputs = policy(tokens, output_hidden_states=True)
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    mask[:, -1] = False
    hidden: Tensor = torch.cat([outputs.hidden_states[layer] for layer in drafter.feature_spec.layers], -1)
    features = Features(
        tokens, mask, hidden.to(drafter.shape.dtype), outputs.logits[..., likely], outputs.logits.argmax(-1)
    )
    drafter.update([features], lr=3e-3, epochs=20)
    drafter.save(directory, policy_version=0)
    return directory


def likely_tokens() -> list[int]:
    """Return the token ids of the likely characters."""
    ids: list[int] = character_tokenizer(64).convert_tokens_to_ids(list(LIKELY))
    return ids
