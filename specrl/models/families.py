"""The model families that can be trained: one row for each, with all its differences from the others.

Loader and exporter, the comparison of weights in the engine, memory plan, FP8 recipe, source check and tiny models read
these rows. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specrl.config.base import ConfigError
from specrl.config.model import ModelConfig, TinyModelConfig
from specrl.models.mtp_modules import ERNIE_MTP, MIMO_MTP, MTP_LAYERS, QWEN3_NEXT_MTP, MtpModule

Layout = Literal["qkv", "gate_up", "columns"]
"""How Megatron lays out the matrices of one linear layer, and how tensor parallelism splits them.

- `qkv`: the queries of one key-value group, then its key, then its value, group after group; split by groups.
- `gate_up`: the gate's rows, then the up projection's; each split by rows.
- `columns`: a single matrix, split by columns.
"""


@dataclass(frozen=True)
class Linear:
    """One linear layer of a transformer layer, which trainer and engine may each fuse from several matrices."""

    megatron: str  # the module inside Megatron's transformer layer, such as `self_attention.linear_qkv`
    engine: str  # the module inside vLLM's transformer layer, such as `self_attn.qkv_proj`
    parts: tuple[str, ...]
    """The modules inside the Hugging Face layer, in the order in which the engine stacks their rows. In those of a
    mixture of experts `{expert}` stands for the expert's number."""
    layout: Layout

    @property
    def name(self) -> str:
        """The name of this layer in FP8 recipes and tables, such as `linear_qkv`.

        All layers of all experts share the name `experts`, because they are one module in the engine.
        """
        return "experts" if self.is_expert else self.megatron.rpartition(".")[2]

    @property
    def is_expert(self) -> bool:
        """Whether each expert has this layer."""
        return "{expert}" in self.parts[0]


ATTENTION = (
    Linear(
        "self_attention.linear_qkv",
        "self_attn.qkv_proj",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "qkv",
    ),
    Linear("self_attention.linear_proj", "self_attn.o_proj", ("self_attn.o_proj",), "columns"),
)
DENSE_MLP = (
    Linear("mlp.linear_fc1", "mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), "gate_up"),
    Linear("mlp.linear_fc2", "mlp.down_proj", ("mlp.down_proj",), "columns"),
)
EXPERTS = (
    Linear(
        "mlp.experts.linear_fc1",
        "mlp.experts",
        ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
        "gate_up",
    ),
    Linear("mlp.experts.linear_fc2", "mlp.experts", ("mlp.experts.{expert}.down_proj",), "columns"),
)  # the engine holds them in one module


@dataclass(frozen=True)
class Router:
    """The layer that chooses the experts of each token, one row of weights for each expert; it is never in FP8."""

    megatron: str  # the module inside Megatron's transformer layer
    hf: str  # the module inside the Hugging Face layer and inside vLLM's


EXPERTS_IN_A_BYTE = 256  # the most that one byte distinguishes


@dataclass(frozen=True)
class ExpertShape:
    """The dimensions of a mixture of experts."""

    num_experts: int  # per transformer layer
    per_token: int  # how many experts compute each token
    intermediate_size: int  # the width of one expert

    @property
    def route_type(self) -> str:
        """The integer type of NumPy and torch that stores the index of an expert for each token."""
        return "uint8" if self.num_experts <= EXPERTS_IN_A_BYTE else "int16"


@dataclass(frozen=True)
class Family:
    """One row: a family of decoders with RMS norms, rotary embeddings and SwiGLU, and how it differs from Llama."""

    name: str  # the family's name in specrl, such as the value of `model.tiny.family`
    architecture: str
    """The first entry of `architectures` in `config.json`, and vLLM's name for the family."""
    model_type: str
    """The transformers class of the family, named as in `transformers.AutoConfig.for_model`."""
    qkv_bias: bool = False  # whether queries, keys and values have a bias; no other linear layer may have one
    qk_norm: bool = False
    """Whether each head's queries and keys pass through an RMS norm (`q_norm`, `k_norm`) before they are rotated."""
    attention: tuple[Linear, ...] = ATTENTION  # the linear layers of attention
    mlp: tuple[Linear, ...] = DENSE_MLP  # the linear layers after attention
    router: Router | None = None
    """The router, if every transformer layer has experts after attention."""
    mtp: MtpModule | None = None
    """The multi-token-prediction layers, for `speculation.method = "mtp"`; None if the family has none."""
    eagle3: bool = True
    """Whether vLLM's model returns the hidden states between its layers, which EAGLE-3 drafters read."""
    can_tie: bool = True  # whether the output layer may share the embeddings' matrix (`tie_word_embeddings`)
    rotary_interleaved: bool = False
    """Whether rotary embeddings rotate channels 2i and 2i + 1 of a head against each other, instead of its halves."""
    experts_from: str | None = None
    """The key of `config.json` that names the first layer with experts; none of the policy's layers may have any."""
    stated: tuple[str, ...] = ("num_key_value_heads",)
    """Keys that `config.json` must have, because transformers would fill in the family's defaults."""
    every_layer: tuple[tuple[str, str], ...] = ()
    """Keys of `config.json` that list something for each transformer layer, with the only entry that is supported."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of a published `config.json` that are removed from the copy for transformers and vLLM."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers of a transformer layer, to which FP8 applies."""
        return self.attention + self.mlp

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The names of the linear layers in FP8 recipes and tables; routers are not among them."""
        return tuple(dict.fromkeys(linear.name for linear in self.linears))

    @property
    def fused(self) -> dict[str, str]:
        """The name of the fused layer for each matrix that the engine fuses with others, by the matrix's name.

        Names lack their parents, as in `q_proj` and `qkv_proj`, and are in the order in which the engine stacks rows.
        """
        return {
            part.rpartition(".")[2]: linear.engine.rpartition(".")[2]
            for linear in self.linears
            if len(linear.parts) > 1 and not linear.is_expert
            for part in linear.parts
        }


FAMILIES: dict[str, Family] = {}  # all rows by name


def register_family(family: Family) -> Family:
    FAMILIES[family.name] = family
    return family


LLAMA = register_family(Family("llama", "LlamaForCausalLM", "llama", stated=()))
register_family(Family("qwen2", "Qwen2ForCausalLM", "qwen2", qkv_bias=True))
register_family(Family("qwen3", "Qwen3ForCausalLM", "qwen3", qk_norm=True, stated=("num_key_value_heads", "head_dim")))
register_family(
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        qk_norm=True,
        mlp=EXPERTS,
        router=Router("mlp.router", "mlp.gate"),
    )
)
# MiMo is a Qwen2 with multi-token-prediction layers. Its checkpoints have the type `mimo` and remote code; without the
# ignored keys they are the Qwen2 that transformers and vLLM compute anyway. vLLM needs an untied head in the
# checkpoint.
register_family(
    Family(
        "mimo",
        "MiMoForCausalLM",
        "qwen2",
        qkv_bias=True,
        mtp=MIMO_MTP,
        eagle3=False,
        can_tie=False,
        ignored_keys=("auto_map", "attention_bias", "use_mrope"),
    )
)
# K-EXAONE without experts and sliding windows is a Qwen3 with the multi-token-prediction layers of Qwen3-Next. Of the
# published model, the trainer could compute neither the router nor the layers without rotary embeddings.
register_family(
    Family(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        qk_norm=True,
        mtp=QWEN3_NEXT_MTP,
        eagle3=False,
        every_layer=(("mlp_layer_types", "dense"), ("layer_types", "full_attention")),
    )
)
# ERNIE 4.5 without experts is a Llama with interleaved rotary embeddings. Its router adds a correction bias to softmax
# scores, which Megatron-core supports only for sigmoids (`transformer_config.py`).
register_family(
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        mtp=ERNIE_MTP,
        eagle3=False,
        rotary_interleaved=True,
        stated=("num_key_value_heads", "tie_word_embeddings"),
        experts_from="moe_layer_start_index",
    )
)

NO_DELTA_NETS = "Megatron-core has no gated delta nets for CPUs"
NO_SIGMOID_ROUTER = "the trainer has neither shared experts nor a router with sigmoid scores and a correction bias"
UNSUPPORTED = {
    "Qwen3NextForCausalLM": NO_DELTA_NETS,
    "Qwen3_5ForCausalLM": NO_DELTA_NETS,
    "Qwen3_5ForConditionalGeneration": NO_DELTA_NETS,
    "DeepseekV3ForCausalLM": "the trainer has no multi-head latent attention",
    "Glm4MoeForCausalLM": NO_SIGMOID_ROUTER,
    "HYV3ForCausalLM": NO_SIGMOID_ROUTER,
    "Step3p5ForCausalLM": "the trainer has no norms that scale by one plus their weight",
}
"""Why families whose multi-token-prediction layers vLLM supports cannot be trained, by architecture."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The row of a checkpoint, given the contents of its `config.json`."""
    listed = config.get("architectures")
    architecture = listed[0] if isinstance(listed, list) and listed else "none given"
    for family in FAMILIES.values():
        if family.architecture == architecture:
            return family
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    reason = f" ({UNSUPPORTED[architecture]})" if architecture in UNSUPPORTED else ""
    raise ConfigError(f"unsupported architecture: {architecture}{reason}; supported: {supported}")


def num_mtp_layers(config: Mapping[str, Any]) -> int:
    """The number of a checkpoint's multi-token-prediction layers, given the contents of its `config.json`."""
    return 0 if family_of(config).mtp is None else int(config.get(MTP_LAYERS) or 0)


def family_of_model(hf: Any) -> Family:
    """The row of a model, given transformers' configuration; one created in code has only its `model_type`."""
    found = [family for family in FAMILIES.values() if not hf.architectures and family.model_type == hf.model_type]
    return found[0] if found else family_of({"architectures": hf.architectures or [hf.model_type]})


TINY_VOCAB_SIZE = 128  # the tokens of the tiny models, padded so that tensor parallelism divides them


def tiny_family(tiny: TinyModelConfig) -> Family:
    """The row of the random model that `model.tiny` describes."""
    if tiny.family not in FAMILIES:
        raise ConfigError(f'model.tiny.family = "{tiny.family}": allowed are {", ".join(FAMILIES)}')
    family = FAMILIES[tiny.family]
    if tiny.tie_embeddings and not family.can_tie:
        raise ConfigError(
            f'model.tiny.tie_embeddings = true with model.tiny.family = "{family.name}": '
            "vLLM needs this family's output layer in the checkpoint; leave tie_embeddings out"
        )
    return family


def tiny_config(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` of the random model of `model.tiny`, except its tokens and type."""
    tiny, family = model.tiny, tiny_family(model.tiny)
    config = {
        "architectures": [family.architecture],
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "head_dim": tiny.hidden_size // tiny.num_heads,
        "tie_word_embeddings": family.can_tie if tiny.tie_embeddings is None else tiny.tie_embeddings,
        "max_position_embeddings": model.max_length,
        **{key: [entry] * tiny.num_layers for key, entry in family.every_layer},
    }
    if family.router is not None:
        config |= {
            "num_experts": tiny.num_experts,
            "num_experts_per_tok": tiny.num_experts_per_tok,
            "moe_intermediate_size": tiny.moe_intermediate_size,
            "norm_topk_prob": True,  # as in the published checkpoints
        }
    if family.experts_from is not None:
        config[family.experts_from] = tiny.num_layers
    return config


def head_dim(hf: Any) -> int:
    """The channels of one attention head, given transformers' configuration of a model."""
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def expert_shape(config: Mapping[str, Any]) -> ExpertShape | None:
    """The dimensions of a checkpoint's experts, given the contents of its `config.json`; None without experts."""
    family = family_of(config)
    if family.router is None:
        return None
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise ConfigError(
            f"{family.architecture} with decoder_sparse_step = {config.get('decoder_sparse_step', 1)} and "
            f"mlp_only_layers = {config.get('mlp_only_layers') or []} is not supported: every layer must have experts, "
            "that is 1 and []"
        )
    experts = config.get("num_experts", config.get("num_local_experts"))  # transformers writes the second name
    per_token, width = config.get("num_experts_per_tok"), config.get("moe_intermediate_size")
    if not experts or not per_token or not width or per_token > experts:
        raise ConfigError(
            f"{family.architecture} with num_experts = {experts}, num_experts_per_tok = {per_token} and "
            f"moe_intermediate_size = {width}: all must be positive, and the second at most the first"
        )
    return ExpertShape(experts, per_token, width)


def expert_shape_of_model(hf: Any) -> ExpertShape | None:
    """The dimensions of a model's experts, given transformers' configuration; None without experts."""
    return expert_shape({**hf.to_dict(), "architectures": [family_of_model(hf).architecture]})
