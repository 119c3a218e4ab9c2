"""Drafting as an engine does it, written out for one sequence with plain loops: the ground truth for the unroll."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specrl.training.drafter.eagle3 import Eagle3


class LiteralDrafter:
    """A KV cache of one sequence and the EAGLE-3 computation from the published tensor names, one slot at a time."""

    def __init__(self, model: Eagle3, embeddings: Tensor) -> None:
        self.shape = model.shape
        self.weights = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
        self.embeddings = embeddings.double()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def feed(self, token: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Append one slot: `(logits [draft_vocab], output hidden state [hidden])`, attending to all slots so far."""
        w = self.weights
        x = torch.cat(
            [
                self._norm(self.embeddings[token], "midlayer.input_layernorm"),
                self._norm(hidden, "midlayer.hidden_norm"),
            ]
        )
        attended = self._attend(x, position)
        hidden = hidden + w["midlayer.self_attn.o_proj.weight"] @ attended
        y = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (w[f"midlayer.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        hidden = hidden + w["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up)
        return w["lm_head.weight"] @ self._norm(hidden, "norm"), hidden

    def draft(self, tokens: list[int], features: Tensor, start: int, k: int, draft_tokens: Tensor) -> list[int]:
        """k greedy drafts after `tokens[: start + 2]`; the policy's features are known up to token `start`."""
        _, logits, hidden = self.prefill(tokens, features, start)
        drafts = [int(draft_tokens[logits.argmax()])]
        for step in range(1, k):
            logits, hidden = self.feed(drafts[-1], hidden, start + step)
            drafts.append(int(draft_tokens[logits.argmax()]))
        return drafts

    def forced(self, tokens: list[int], features: Tensor, start: int, k: int) -> list[Tensor]:
        """Logits of k steps when the true tokens are fed instead of the drafter's own."""
        all_logits, logits, hidden = self.prefill(tokens, features, start)
        for step in range(1, k):
            logits, hidden = self.feed(tokens[start + step + 1], hidden, start + step)
            all_logits.append(logits)
        return all_logits

    def prefill(self, tokens: list[int], features: Tensor, start: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """Slots 0..start from the policy's features `[seq, 3 * hidden]`."""
        self.keys, self.values = [], []
        for slot in range(start + 1):
            fed = self.weights["fc.weight"] @ features[slot].double()
            logits, hidden = self.feed(tokens[slot + 1], fed, slot)
        return [logits], logits, hidden

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + self.shape.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]

    def _attend(self, x: Tensor, position: int) -> Tensor:
        q, k, v = (self.weights[f"midlayer.self_attn.{name}_proj.weight"] @ x for name in "qkv")
        size, group = self.shape.head_dim, self.shape.num_heads // self.shape.num_kv_heads
        self.keys.append(self._rotate(k.view(-1, size), position))
        self.values.append(v.view(-1, size))
        keys, values = torch.stack(self.keys), torch.stack(self.values)
        heads = []
        for head, query in enumerate(self._rotate(q.view(-1, size), position)):
            weights = (keys[:, head // group] @ query / size**0.5).softmax(0)
            heads.append(weights @ values[:, head // group])
        return torch.cat(heads)

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        angles = position * self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(x[:, :half].contiguous(), x[:, half:].contiguous()) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.cat([turned.real, turned.imag], -1)
