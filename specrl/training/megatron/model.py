"""The policy network: a Megatron-core GPTModel built from a Hugging Face configuration and its family's row.

On GPUs the layers are Transformer Engine's, on CPUs Megatron's local ones. Both use attention over flat rows. The
choice is made once, by the device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from specrl.config import ConfigError, PolicyConfig
from specrl.models.checks.config import check_config, rope_of
from specrl.models.families import ExpertShape, Family, expert_shape_of_model, family_of_model, head_dim
from specrl.models.layout import trainer_problems
from specrl.models.rope import rope_frequencies
from specrl.models.shapes import shape_of
from specrl.training.batches import rows_of
from specrl.training.megatron.attention import PackedAttention, row_layout
from specrl.training.megatron.scores import OutputLayer, most_likely, token_scores

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
logging.getLogger(GPTModel.__module__).setLevel(logging.ERROR)  # each model would warn that HybridModel is to follow


@dataclass(frozen=True)
class HeadInput:
    """The positions at which the output layer is evaluated; most (those of prompts) need no logits."""

    places: Tensor
    """[n] int64: the places in the row at which the output layer is evaluated; a place may occur several times."""
    targets: Tensor
    temperature: float
    kept: Tensor | None = None
    """[kept] int64: the positions whose most likely token is returned too; None for no token at all."""


@dataclass(frozen=True)
class HeadOutput:
    logprobs: Tensor
    """[n] float32, differentiable."""
    entropy: Tensor
    """[n] float32, nats, differentiable."""
    top1: Tensor | None = None
    """[kept] int64: the most likely token of the whole vocabulary."""


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A GPTModel whose last pipeline stage returns the scores of chosen positions instead of all logits."""

    def __init__(self, *args: Any, family: Family, true_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.family = family
        self.true_vocab_size = true_vocab_size
        if self.post_process and self.config.sequence_parallel:
            # `_score` gathers the sequence and selects positions first: the layer's input is whole, and its gradient
            # is summed over the ranks as without sequence parallelism.
            self.output_layer.sequence_parallel, self.output_layer.allreduce_dgrad = False, True

    def forward(self, tokens: Tensor, segments: Tensor, head: HeadInput) -> Tensor | HeadOutput:
        """This stage's hidden states [tokens, 1, hidden], and on the last stage the scores."""
        inputs = tokens[None], row_layout(segments, tokens.device).positions[None], segments
        if not self.post_process:
            hidden: Tensor = super().forward(*inputs)
            return hidden
        return self._score(super().forward(*inputs), head)

    def _preprocess(self, *, position_ids: Tensor, **inputs: Any) -> tuple[Any, ...]:
        first, rotary, *others = super()._preprocess(position_ids=position_ids, **inputs)
        # The table is indexed by position; the layers rotate a row's tokens by the table's rows in order.
        return first, None if rotary is None else rotary[position_ids[0]], *others

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states  # without the output layer, which `_score` applies to the positions that need it

    def output(self) -> OutputLayer:
        """The output layer without the columns that pad the vocabulary."""
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
        columns = min(len(weight), self.true_vocab_size - first)

        def logits(hidden: Tensor) -> Tensor:
            found, _ = self.output_layer(hidden[:, None], weight=weight if shared else None)
            return found[:, 0, :columns]  # type: ignore[no-any-return]

        return OutputLayer(weight, logits, first, columns, parallel_state.get_tensor_model_parallel_group())

    def _score(self, hidden: Tensor, head: HeadInput) -> HeadOutput:
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        chosen, layer = rows_of(hidden[:, 0], head.places), self.output()
        scored = partial(token_scores, chosen, head.targets, layer, temperature=head.temperature)
        if head.kept is None:
            return HeadOutput(*scored())
        top1 = list[Tensor]()
        scores = scored(on_logits=lambda part: top1.append(most_likely(part, layer.first, layer.group)))
        return HeadOutput(*scores, torch.cat(top1)[head.kept])


def check_supported(hf: Any, policy: PolicyConfig) -> None:
    """Raise ConfigError for a model or layout with which the policy would silently compute something else."""
    found = {**hf.to_dict(), "architectures": [family_of_model(hf).architecture]}
    check_config(found)
    for problem in trainer_problems(policy, shape_of(found), "the model"):
        raise ConfigError(problem)


def transformer_config(
    hf: Any, dtype: torch.dtype, *, cuda: bool, recompute: bool, native_fp8: bool = False
) -> TransformerConfig:
    """Megatron's configuration of a model; with `cuda` its layers are Transformer Engine's."""
    family, experts, (_, scale) = family_of_model(hf), expert_shape_of_model(hf), _rope(hf)
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    recompute_all = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=tensor,
        # "Makes tensor parallelism more memory efficient for LLMs (20B+) by parallelizing layer norms and dropout
        # sequentially" (`ModelParallelConfig`): norms and residuals are computed once, and not on every rank.
        sequence_parallel=tensor > 1,
        pipeline_model_parallel_size=pipeline,
        variable_seq_lengths=pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # required for variable lengths, even without experts
        expert_tensor_parallel_size=1,
        # Losses arrive divided by the global token count: nothing else may divide them (`Policy.train_step`).
        calculate_per_token_loss=True,
        perform_initialization=False,  # every parameter is loaded
        use_cpu_initialization=not cuda,
        persist_layer_norm=cuda,
        bias_activation_fusion=True,  # saves the activation's input alone
        bias_dropout_fusion=cuda,
        apply_rope_fusion=cuda,
        softmax_scale=scale**2 * head_dim(hf) ** -0.5 if scale != 1 else None,  # YaRN scales both queries and keys
        gradient_accumulation_fusion=False,  # for the layers that have it, see `optimizer.wrap`
        cuda_graph_modules=[],  # there are no graphs; of its own default Megatron warns that it is deprecated
        **(recompute_all if recompute else {}),
        **(_expert_options(hf, experts, cuda=cuda) if experts else {}),
        **({"fp8": "e4m3", "fp8_recipe": "blockwise"} if native_fp8 else {}),
    )


def _expert_options(hf: Any, experts: ExpertShape, *, cuda: bool) -> dict[str, Any]:
    """The part of Megatron's configuration that concerns experts.

    There is no load-balancing loss, as usual in RL. The router computes in float32.
    """
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not hf.norm_topk_prob,  # normalised over the chosen experts, or over all
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": cuda,
        "moe_permute_fusion": cuda,  # without it tokens are added up in no fixed order
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }


def build_model(hf: Any, config: TransformerConfig, *, cuda: bool) -> PolicyModel:
    """This rank's part of the network, with uninitialised parameters."""
    frequencies, _ = _rope(hf)
    model = PolicyModel(
        config,
        _cuda_layers(config) if cuda else _cpu_layers(config),
        family=family_of_model(hf),
        true_vocab_size=hf.vocab_size,
        vocab_size=-(-hf.vocab_size // config.tensor_model_parallel_size) * config.tensor_model_parallel_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
    )
    model.rotary_pos_emb.inv_freq = frequencies.to(model.rotary_pos_emb.inv_freq.device)
    return model


def _rope(hf: Any) -> tuple[Tensor, float]:
    return rope_frequencies(rope_of(hf.to_dict()), head_dim(hf), hf.max_position_embeddings)


def _cuda_layers(config: TransformerConfig) -> ModuleSpec:
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
    )
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def _cpu_layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = [spec] * (config.num_layers // config.pipeline_model_parallel_size)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


class RMSNorm(torch.nn.RMSNorm):
    """PyTorch's norm with Megatron's arguments; Megatron's own wrapper of it refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # sums its gradients
