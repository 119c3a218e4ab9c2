"""A small MiMo for tests, and drafting with its multi-token-prediction layer, by transformers' own layer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from specrl.config import ModelConfig
from specrl.models.sources import materialise_model
from specrl.training.features import Features

PREFIX = "model.mtp_layers.0."


def write_mimo(directory: Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """A random model whose norms and biases differ from their defaults, so that none can be forgotten."""
    shape = {"family": "mimo", "num_layers": 6, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
    config = {"source": "tiny", "dtype": dtype, "max_length": 128, "tiny": {**shape, "num_kv_heads": 1}}
    materialise_model(ModelConfig.model_validate(config), seed, directory)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        scale = 3.0 if tensor.dim() == 2 else 1.0
        noise = 0.1 * torch.randn(tensor.shape, generator=generator)
        weights[name] = (scale * tensor.float() + noise).to(tensor.dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def mtp_weights(directory: Path) -> dict[str, Tensor]:
    """The layer's tensors by their names on disk."""
    weights = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in weights.items() if name.startswith(PREFIX)}


def trunk(directory: Path) -> Qwen2ForCausalLM:
    """The policy without its layer, as transformers computes it."""
    return Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32)


@torch.no_grad()
def last_hidden(model: Qwen2ForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
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
    return Features(tokens, mask, hidden, logits[..., :0], logits.argmax(-1))


class LiteralMtp:
    """The layer run as published: causal over all slots of one sequence, the policy's and then the chain's own."""

    def __init__(self, directory: Path, layer_weights: dict[str, Tensor]) -> None:
        config = Qwen2Config(**json.loads((directory / "config.json").read_text()))
        config._attn_implementation = "eager"
        weights = {name.removeprefix(PREFIX): tensor.float() for name, tensor in layer_weights.items()}
        self.block, self.rotary = Qwen2DecoderLayer(config, 0), Qwen2RotaryEmbedding(config)
        self.block.load_state_dict({name: weights.pop(name) for name in self.block.state_dict()})
        self.project = weights.pop("input_proj.weight")
        self.norms = torch.nn.ModuleDict()
        for name in list(weights):
            norm = Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps)
            norm.weight.data = weights.pop(name)
            self.norms[name.removesuffix("_layernorm.weight")] = norm
        policy = load_file(directory / "model.safetensors")
        self.embeddings, self.head = policy["model.embed_tokens.weight"].float(), policy["lm_head.weight"].float()

    @torch.no_grad()
    def outputs(self, next_tokens: list[int], hidden: Tensor) -> Tensor:
        """Normed outputs `[slots, hidden]` of slots with these next tokens and hidden states `[slots, hidden]`."""
        embedded = self.embeddings[torch.tensor(next_tokens)]
        embedded[0] = 0
        x = torch.cat([self.norms["hidden"](hidden), self.norms["token"](embedded)], -1) @ self.project.T
        positions = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        rotary = self.rotary(x[None], positions)
        y = self.block(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return self.norms["final"]((y[0] if isinstance(y, tuple) else y)[0])

    def chain(self, tokens: list[int], hidden: Tensor, start: int, k: int, *, forced: bool) -> list[Tensor]:
        """Logits of k steps from slot `start`; the true tokens are fed when `forced`, else those drafted."""
        fed, following, logits = hidden[: start + 1], tokens[1 : start + 2], list[Tensor]()
        for step in range(k):
            output = self.outputs(following, fed)[-1]
            logits.append(self.head @ output)
            fed = torch.cat([fed, output[None]])
            token = tokens[start + step + 2] if forced and step + 1 < k else int(logits[-1].argmax())
            following = [*following, token]
        return logits
