"""The multi-token-prediction layers of model families: the names of their tensors, and how they draft.

Families in `models/families.py` refer to one row per kind; `training/drafter/kinds/mtp.py` computes the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

MTP_LAYERS = "num_nextn_predict_layers"  # the key of their number in `config.json`


@dataclass(frozen=True)
class MtpModule:
    """The multi-token-prediction layers of a family, whose tensors are part of the checkpoint, and how they draft.

    A layer is a decoder layer after a projection of two normed inputs, a token's embedding and a hidden state. vLLM
    drafts all tokens with the first layer, applied repeatedly to its own output: its proposer
    (`llm_base_proposer.propose`) uses no other. Embeddings and head are the policy's in all of them.

    The names are those of modules on disk, where `{layer}` stands for the layer's number, from 0.
    """

    prefix: str  # common to the names of all tensors
    block: str  # prefix of the names of a decoder layer's tensors
    token_norm: str  # the norm of the embedding
    hidden_norm: str  # the norm of the hidden state
    projection: str  # of both, side by side
    final_norm: str | None  # the norm of the layer's output
    in_engine: tuple[tuple[str, str], ...]
    """(prefix on disk, prefix in vLLM) of the first layer's names, with `{first}` for its number. The first pair that
    fits counts; other names are the same in both.
    """
    token_first: bool  # the projection reads the embedding before the hidden state
    reads_normed: bool  # the hidden state has passed the policy's final norm
    masks_first: bool  # the embedding in slot 0 is treated as zero
    several: bool = True  # vLLM loads a checkpoint with several layers

    def name_on_disk(self, own: str, layer: int = 0) -> str:
        """The name of a layer's tensor on disk, given its name in `training/drafter/kinds/mtp.py`."""
        module, _, kind = own.rpartition(".")
        beside = {
            "token_layernorm": self.token_norm,
            "hidden_layernorm": self.hidden_norm,
            "input_proj": self.projection,
            "final_layernorm": self.final_norm,
        }
        return (f"{beside[module]}.{kind}" if module in beside else self.block + own).format(layer=layer)

    def name_in_engine(self, name: str, first: int) -> str:
        """vLLM's name, before fusing matrices, of a tensor of the first layer, whose number there is `first`."""
        for beginning, other in self.in_engine:
            if name.startswith(beginning):
                return other.format(first=first) + name.removeprefix(beginning)
        return name

    def drafts(self, name: str) -> bool:
        """Whether a tensor of the checkpoint, by its name, belongs to the first layer or to all of them."""
        modules = (self.block, self.token_norm, self.hidden_norm, self.projection, self.final_norm)
        beginnings = tuple(module.format(layer=0) for module in modules if module is not None)
        return name.startswith(beginnings)


MIMO_MTP = MtpModule(
    prefix="model.mtp_layers.",
    block="model.mtp_layers.{layer}.",
    token_norm="model.mtp_layers.{layer}.token_layernorm",
    hidden_norm="model.mtp_layers.{layer}.hidden_layernorm",
    projection="model.mtp_layers.{layer}.input_proj",
    final_norm="model.mtp_layers.{layer}.final_layernorm",
    in_engine=(
        *(
            (f"model.mtp_layers.0.{part}", f"model.mtp_layers.{{first}}.mtp_block.{part}")
            for part in ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
        ),
        ("model.mtp_layers.0.", "model.mtp_layers.{first}."),
    ),
    token_first=False,
    reads_normed=False,
    masks_first=True,
)
"""MiMo (Xiaomi, 2025)."""
QWEN3_NEXT_MTP = MtpModule(
    prefix="mtp.",
    block="mtp.layers.{layer}.",
    token_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    final_norm="mtp.norm",
    in_engine=(("mtp.", "model."),),
    token_first=True,
    reads_normed=True,
    masks_first=False,
)
"""Qwen3-Next, Qwen3.5 and K-EXAONE, which share the projection and the norms beside it."""
ERNIE_MTP = MtpModule(
    prefix="model.mtp_",
    block="model.mtp_block.{layer}.",
    token_norm="model.mtp_emb_norm.{layer}",
    hidden_norm="model.mtp_hidden_norm.{layer}",
    projection="model.mtp_linear_proj.{layer}",
    final_norm=None,
    in_engine=tuple(
        (f"model.{module}.0.", f"model.layers.{{first}}.{module}.")
        for module in ("mtp_block", "mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj")
    ),
    token_first=True,
    reads_normed=True,
    masks_first=True,
    several=False,
)
"""ERNIE 4.5 (Baidu, 2025): a Llama's layer, whose output the head reads as it is."""
