"""A toy policy and drafter with few likely tokens, so that even random drafts are accepted now and then."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specrl.config import Config, DrafterConfig
from specrl.distributed import Ranks
from specrl.models.families import TINY_VOCAB_SIZE
from specrl.models.tiny import character_tokenizer
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 128, 256, 6, 4, 2
NUM_LIKELY = 10
"""Of the characters acegikmoqs; all others, the end token among them, are rare."""
SHIFT = 3.0
"""Common first channel of all embeddings; through it the head tells likely tokens from rare ones."""
RARE = -3.0
SLOPE = -0.4
"""Through the same channel each likely token is less likely than the one before it, in policy and drafter alike."""


class ToyTrainer:
    """The trainer's drafter: tensors that a fault may change on their way to the engine, or for good."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    @property
    def changes(self) -> int:
        return id(self.weights)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in state.items()}


def toy_config(
    method: str = "none",
    k: int = 0,
    *,
    max_length: int = 192,
    dtype: str = "float32",
    adaptive: bool = False,
    draft_model: Path | None = None,
    max_num_seqs: int = 32,
) -> Config:
    return Config.model_validate(
        {
            "name": "toy",
            "model": {"source": "tiny", "dtype": dtype, "max_length": max_length},
            "sampling": {"max_response_tokens": 64},
            "speculation": {"method": method, "k": k, "adaptive": adaptive, "draft_model": draft_model},
            "engine": {"max_num_seqs": max_num_seqs, "kv_cache_gib": 0.125},
        }
    )


def likely_tokens() -> list[int]:
    tokenizer = character_tokenizer(64)
    ids: list[int] = tokenizer.convert_tokens_to_ids(list("acegikmoqs"[:NUM_LIKELY]))
    return ids


def policy_weights(seed: int, *, tied: bool = False) -> dict[str, Tensor]:
    """A random policy's tensors by their on-disk names, FP32, an explicit head always among them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(llama_config(tied))
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if not tied:
        weights["model.embed_tokens.weight"] *= 10
        weights["model.embed_tokens.weight"][:, 0] = SHIFT
        weights["lm_head.weight"] *= 2
        weights["lm_head.weight"][:, 0] = RARE
        weights["lm_head.weight"][likely_tokens(), 0] = SLOPE * torch.arange(NUM_LIKELY)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] if tied else weights["lm_head.weight"]
    return weights


def llama_config(tied: bool = False, max_length: int = 192) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=tied,
        max_position_embeddings=max_length,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def write_policy(directory: Path, weights: dict[str, Tensor], *, tied: bool = False, dtype: str = "float32") -> Path:
    directory.mkdir(parents=True)
    kind = getattr(torch, dtype)
    llama_config(tied).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config))
    kept = {name: tensor.to(kind) for name, tensor in weights.items() if not (tied and name == "lm_head.weight")}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    character_tokenizer(192).save_pretrained(directory)
    return directory


def write_trained_drafter(
    directory: Path, policy_dir: Path, *, source: Path | None = None, epochs: int = 40, **shape: Any
) -> Path:
    """An EAGLE-3 drafter, by default over the likely tokens, taught by the policy's responses: it is often right.

    Args:
        source: The folder of the drafter to start from, in any layout, in place of a new one.
        shape: Settings of `DrafterConfig`.
    """
    generator, likely = torch.Generator().manual_seed(0), torch.tensor(likely_tokens())
    depth = 5 if shape.get("parallel") else 3
    config = DrafterConfig.model_validate({"lr": 3e-3, "ttt_steps": depth, "draft_vocab_size": NUM_LIKELY, **shape})
    alone = Ranks(0, 1, 0, torch.device("cpu"))
    vocabulary = likely if config.draft_vocab_size == NUM_LIKELY else torch.arange(config.draft_vocab_size)
    if source is None:
        drafter = Drafter.create(policy_dir, config, vocabulary, alone)
    else:
        drafter = Drafter.load(source, policy_dir, config, alone)
    policy = LlamaForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    tokens = likely[torch.randint(NUM_LIKELY, (128, 6), generator=generator)]
    with torch.no_grad():
        for _ in range(12):
            probs = policy(tokens).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, probs.multinomial(1, generator=generator)], 1)
        last: list[Tensor] = []
        policy.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
        outputs = policy(tokens, output_hidden_states=True)
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    mask[:, -1] = False
    streams = [*outputs.hidden_states[:-1], *last]  # transformers gives the last one normed
    hidden = torch.cat([streams[layer] for layer in drafter.feature_layers], -1)
    starts = torch.zeros(len(tokens), dtype=torch.int64)
    drafter.update([Features(tokens, mask, hidden, outputs.logits.argmax(-1), starts)], lr=3e-3, epochs=epochs)
    drafter.save(directory, policy_version=0)
    return directory


def drafter_weights(seed: int, dtype: str = "float32") -> dict[str, Tensor]:
    """A random EAGLE-3 drafter over the likely tokens, by on-disk names."""
    generator = torch.Generator().manual_seed(seed)
    head_dim = HIDDEN // HEADS
    draft_tokens = torch.tensor(likely_tokens())
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "midlayer.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "lm_head.weight": (NUM_LIKELY, HIDDEN),
    }
    first_channel = torch.zeros(3 * HIDDEN).index_fill(0, torch.tensor([0, HIDDEN, 2 * HIDDEN]), 1.0)
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    weights["fc.weight"][0] = first_channel
    weights["lm_head.weight"][:, 0] = SLOPE * torch.arange(NUM_LIKELY)
    weights |= {f"midlayer.{name}.weight": torch.rand(HIDDEN, generator=generator) + 0.5 for name in norms}
    weights["norm.weight"] = torch.rand(HIDDEN, generator=generator) + 0.5
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    is_drafted = torch.zeros(TINY_VOCAB_SIZE, dtype=torch.bool)
    is_drafted[draft_tokens] = True
    return weights | {"d2t": draft_tokens - torch.arange(NUM_LIKELY), "t2d": is_drafted}


def write_drafter(directory: Path, weights: dict[str, Tensor], dtype: str = "float32") -> Path:
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "num_hidden_layers": 1,
        "vocab_size": TINY_VOCAB_SIZE,
        "draft_vocab_size": NUM_LIKELY,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
