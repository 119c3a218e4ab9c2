"""Drafting as an engine does it, written out for one sequence with plain loops: the ground truth for the unroll."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specrl.models.rope import rope_frequencies
from specrl.training.drafter.kinds.eagle3 import Eagle3, Eagle3Shape


class LiteralDrafter:
    """A KV cache of one sequence and the EAGLE-3 computation from the published tensor names, one slot at a time."""

    def __init__(self, model: Eagle3, embeddings: Tensor) -> None:
        assert isinstance(model.shape, Eagle3Shape)
        self.shape = model.shape
        self.frequencies, self.scale = rope_frequencies(
            self.shape.rope, self.shape.head_dim, self.shape.max_position_embeddings
        )
        self.weights = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
        self.embeddings = embeddings.double()
        self.keys: list[list[Tensor]] = []
        self.values: list[list[Tensor]] = []

    def feed(self, token: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Append one slot: `(logits [draft_vocab], output hidden state [hidden])`, attending to all slots so far."""
        w = self.weights
        embedded = self._norm(self.embeddings[token], "midlayer.input_layernorm")
        for number in range(self.shape.num_layers):
            layer = f"layers.{number}" if number else "midlayer"
            x = self._norm(hidden, f"{layer}.{'input_layernorm' if number else 'hidden_norm'}")
            attended = self._attend(x if number else torch.cat([embedded, x]), position, number, layer)
            hidden = x if self.shape.norm_before_residual and not number else hidden
            hidden = hidden + w[f"{layer}.self_attn.o_proj.weight"] @ attended
            y = self._norm(hidden, f"{layer}.post_attention_layernorm")
            gate, up = (w[f"{layer}.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
            hidden = hidden + w[f"{layer}.mlp.down_proj.weight"] @ (F.silu(gate) * up)
        output = self._norm(hidden, "norm")
        return w["lm_head.weight"] @ output, output if self.shape.norm_output else hidden

    def draft(self, tokens: list[int], features: Tensor, start: int, k: int, draft_tokens: Tensor) -> list[int]:
        """k greedy drafts after `tokens[: start + 2]`; the policy's features are known up to token `start`."""
        _, logits, hidden = self.prefill(tokens, features, start)
        drafts = [int(draft_tokens[logits.argmax()])]
        for step in range(1, k):
            logits, hidden = self.go_on(drafts[-1], hidden, start + step)
            drafts.append(int(draft_tokens[logits.argmax()]))
        return drafts

    def forced(self, tokens: list[int], features: Tensor, start: int, k: int) -> list[Tensor]:
        """Logits of k steps when the true tokens are fed instead of the drafter's own."""
        all_logits, logits, hidden = self.prefill(tokens, features, start)
        for step in range(1, k):
            logits, hidden = self.go_on(tokens[start + step + 1], hidden, start + step)
            all_logits.append(logits)
        return all_logits

    def go_on(self, token: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """The slot after another one of the drafter's own."""
        return self.feed(token, hidden, position)

    def prefill(self, tokens: list[int], features: Tensor, start: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """Slots 0..start from the policy's features `[seq, layers * hidden]`."""
        self.keys, self.values = ([[] for _ in range(self.shape.num_layers)] for _ in range(2))
        for slot in range(start + 1):
            own = features[slot, : self.weights["fc.weight"].shape[1]]
            fed = self.weights["fc.weight"] @ self._normed_features(own.double())
            logits, hidden = self.feed(tokens[slot + 1], fed, slot)
        return [logits], logits, hidden

    def _normed_features(self, features: Tensor) -> Tensor:
        if self.shape.norm_before_fc:
            features = self._norm(features, "input_norm")
        if self.shape.fc_norm:
            parts = features.view(-1, self.shape.hidden_size)
            features = torch.cat([self._norm(part, f"fc_norm.{number}") for number, part in enumerate(parts)])
        return features

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + self.shape.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]

    def _attend(self, x: Tensor, position: int, number: int, layer: str) -> Tensor:
        q, k, v = (self.weights[f"{layer}.self_attn.{name}_proj.weight"] @ x for name in "qkv")
        size, group = self.shape.head_dim, self.shape.num_heads // self.shape.num_kv_heads
        self.keys[number].append(self._rotate(k.view(-1, size), position))
        self.values[number].append(v.view(-1, size))
        window = self.shape.sliding_window or len(self.keys[number])
        keys, values = torch.stack(self.keys[number][-window:]), torch.stack(self.values[number][-window:])
        heads = []
        for head, query in enumerate(self._rotate(q.view(-1, size), position)):
            weights = (keys[:, head // group] @ query / size**0.5).softmax(0)
            heads.append(weights @ values[:, head // group])
        return torch.cat(heads)

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        angles = position * self.frequencies.double()
        turned = torch.complex(x[:, :half].contiguous(), x[:, half:].contiguous()) * torch.polar(
            torch.full_like(angles, self.scale), angles
        )
        return torch.cat([turned.real, turned.imag], -1)
