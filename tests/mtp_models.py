"""Small policies with multi-token-prediction layers for tests, and drafting with them by transformers' own layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specrl.config import ModelConfig
from specrl.models.sources import materialise_model
from specrl.training.features import Features

PREFIX = "model.mtp_layers.0."
"""The prefix of MiMo's first layer."""
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "tie_word_embeddings"),
)


@dataclass(frozen=True)
class Published:
    """A family's layer as its authors and vLLM have it; written apart from the table that is tested."""

    block: str
    beside: dict[str, str]
    config: Any
    layer: Any
    model: Any
    embedding_first: bool
    after_norm: bool
    empty_start: bool


FAMILIES = {
    "mimo": Published(
        PREFIX,
        {
            "token": f"{PREFIX}token_layernorm",
            "hidden": f"{PREFIX}hidden_layernorm",
            "final": f"{PREFIX}final_layernorm",
            "project": f"{PREFIX}input_proj",
        },
        *(Qwen2Config, Qwen2DecoderLayer, Qwen2ForCausalLM),
        embedding_first=False,
        after_norm=False,
        empty_start=True,
    ),
    "exaone_moe": Published(
        "mtp.layers.0.",
        {
            "token": "mtp.pre_fc_norm_embedding",
            "hidden": "mtp.pre_fc_norm_hidden",
            "final": "mtp.norm",
            "project": "mtp.fc",
        },
        *(Qwen3Config, Qwen3DecoderLayer, Qwen3ForCausalLM),
        embedding_first=True,
        after_norm=True,
        empty_start=False,
    ),
    "ernie4_5_moe": Published(
        "model.mtp_block.0.",
        {"token": "model.mtp_emb_norm.0", "hidden": "model.mtp_hidden_norm.0", "project": "model.mtp_linear_proj.0"},
        *(Ernie4_5Config, LlamaDecoderLayer, Ernie4_5ForCausalLM),
        embedding_first=True,
        after_norm=True,
        empty_start=True,
    ),
}


def write_mtp_model(
    directory: Path, family: str = "mimo", *, layers: int = 1, dtype: str = "float32", seed: int = 0
) -> Path:
    """A random model whose norms and biases differ from their defaults, so that none can be forgotten."""
    shape = {"num_layers": 6, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_kv_heads": 1}
    tiny = {"family": family, "mtp_layers": layers, **shape}
    config = {"source": "tiny", "dtype": dtype, "max_length": 128, "tiny": tiny}
    materialise_model(ModelConfig.model_validate(config), seed, directory)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        scale = 3.0 if tensor.dim() == 2 else 1.0
        noise = 0.1 * torch.randn(tensor.shape, generator=generator)
        weights[name] = (scale * tensor.float() + noise).to(tensor.dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def family_in(directory: Path) -> Published:
    config = AutoConfig.from_pretrained(directory)
    return FAMILIES["mimo" if config.model_type == "qwen2" else config.model_type]


def mtp_weights(directory: Path) -> dict[str, Tensor]:
    """The first layer's tensors by their names on disk."""
    family = family_in(directory)
    names = (family.block, *family.beside.values())
    return {
        name: tensor for name, tensor in load_file(directory / "model.safetensors").items() if name.startswith(names)
    }


def trunk_config(directory: Path) -> Any:
    """What transformers computes the policy with: without experts and windows K-EXAONE is a Qwen3."""
    found = AutoConfig.from_pretrained(directory)
    sizes = {name: getattr(found, name) for name in SIZES}
    sizes["head_dim"] = found.hidden_size // found.num_attention_heads
    # A Llama's layer asks ERNIE's configuration for these.
    config = family_in(directory).config(**sizes, attention_dropout=0.0, attention_bias=False, mlp_bias=False)
    config._attn_implementation = "eager"
    return config


def trunk(directory: Path) -> Any:
    """The policy without its layers, as transformers computes it."""
    model = family_in(directory).model(trunk_config(directory)).eval()
    weights = load_file(directory / "model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict({name: weights[name].float() for name in model.state_dict()})
    return model


@torch.no_grad()
def last_hidden(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Residual stream after the last layer, before the final norm, and logits, of `[batch, seq]` tokens."""
    found: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    logits: Tensor = model(tokens).logits
    hook.remove()
    return found[0], logits


def greedy_features(directory: Path, prompts: Tensor, length: int) -> Features:
    """Greedy responses of the policy to `[batch, prompt]`, and the features of its own forward pass over them."""
    model, tokens = trunk(directory), prompts
    for _ in range(length):
        tokens = torch.cat([tokens, last_hidden(model, tokens)[1][:, -1:].argmax(-1)], 1)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[:, prompts.shape[1] - 1 : -1] = True
    hidden, logits = last_hidden(model, tokens)
    return Features(tokens, mask, hidden, logits.argmax(-1), torch.zeros(len(tokens), dtype=torch.int64))


class LiteralMtp:
    """The layer run as published: causal over all slots of one sequence, the policy's and then the chain's own."""

    def __init__(self, directory: Path, layer_weights: dict[str, Tensor]) -> None:
        self.family, config = family_in(directory), trunk_config(directory)
        weights = {name: tensor.float() for name, tensor in layer_weights.items()}
        self.block, self.rotary = self.family.layer(config, 0), Qwen2RotaryEmbedding(config)
        self.block.load_state_dict({name: weights.pop(self.family.block + name) for name in self.block.state_dict()})
        policy = load_file(directory / "model.safetensors")
        self.norms = torch.nn.ModuleDict()
        for name, module in {**self.family.beside, "policy": "model.norm"}.items():
            weight = (policy if name == "policy" else weights)[f"{module}.weight"]
            if name == "project":
                self.project = weight
                continue
            self.norms[name] = Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.norms[name].weight.data = weight.float()
        self.embeddings = policy["model.embed_tokens.weight"].float()
        self.head = policy.get("lm_head.weight", self.embeddings).float()

    @torch.no_grad()
    def outputs(self, next_tokens: list[int], hidden: Tensor) -> Tensor:
        """Normed outputs `[slots, hidden]` of slots with these next tokens and hidden states `[slots, hidden]`."""
        embedded = self.embeddings[torch.tensor(next_tokens)]
        if self.family.empty_start:
            embedded[0] = 0
        both = [self.norms["hidden"](hidden), self.norms["token"](embedded)]
        x = torch.cat(both[::-1] if self.family.embedding_first else both, -1) @ self.project.T
        positions = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        rotary = self.rotary(x[None], positions)
        y = self.block(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        output: Tensor = (y[0] if isinstance(y, tuple) else y)[0]
        return self.norms["final"](output) if "final" in self.norms else output

    @torch.no_grad()
    def chain(self, tokens: list[int], hidden: Tensor, start: int, k: int, *, forced: bool) -> list[Tensor]:
        """Logits of k steps from slot `start`; the true tokens are fed when `forced`, else those drafted."""
        fed, following, logits = hidden[: start + 1], tokens[1 : start + 2], list[Tensor]()
        if self.family.after_norm:
            fed = self.norms["policy"](fed)
        for step in range(k):
            output = self.outputs(following, fed)[-1]
            logits.append(self.head @ output)
            fed = torch.cat([fed, output[None]])
            token = tokens[start + step + 2] if forced and step + 1 < k else int(logits[-1].argmax())
            following = [*following, token]
        return logits
