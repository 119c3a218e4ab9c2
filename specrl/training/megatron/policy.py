"""The policy in training: a Megatron-core model, its optimizer, and the operations that the loop needs.

All ranks call every method marked as collective, in the same order. The tensor and pipeline shards of one
data-parallel rank pass the same micro-batches; different data-parallel ranks may pass different numbers of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from transformers import AutoConfig

from specrl.config import PolicyConfig
from specrl.distributed import Ranks
from specrl.models.directory import HEAD
from specrl.models.families import family_of_model
from specrl.models.hf_io import mtp_layers, write_model
from specrl.precision.kv_scales import KvObserver
from specrl.training.batches import MicroBatch, empty_micro_batch
from specrl.training.features import Features, Window
from specrl.training.lora import write_adapter
from specrl.training.megatron import parallel, weights
from specrl.training.megatron.capture import KeptRows, LayerInputs, assemble
from specrl.training.megatron.export import export
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.model import (
    DTYPES,
    HeadInput,
    HeadOutput,
    PolicyModel,
    build_model,
    check_supported,
    transformer_config,
)
from specrl.training.megatron.optimizer import PolicyOptimizer, policy_shards, wrap
from specrl.training.megatron.routing import RoutingReplay
from specrl.training.pieces import Shard

LossFn = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""A function of log-probs, entropy and the micro-batch that returns the loss and metrics.

Log-probs and entropy (in nats, both differentiable) are [sequences, longest response] float32: one for each response
token, as in the micro-batch's mask, and zero where that is False. The loss is a sum, already divided by the
token count of the global batch: it is added up over micro-batches and data-parallel ranks, and nothing divides it
again. The same is true of the metrics.
"""
FP8_TOKENS = 16
"""Transformer Engine's FP8 products, including those of weight gradients, need multiples of this many tokens."""


@dataclass(frozen=True)
class _Outcome:
    logprobs: Tensor
    """[sequences, longest response] float32, detached."""
    num_tokens: int
    top1: Tensor | None
    sums: dict[str, Tensor]
    """`loss` and the loss function's metrics, for which nothing waits before the pass is over."""


class Policy:
    """A causal language model split over the ranks, trainable or frozen."""

    def __init__(
        self,
        model_dir: Path,
        config: PolicyConfig,
        *,
        dtype: str,
        ranks: Ranks,
        trainable: bool = True,
        seed: int,
        fp8: LinearPrecision | None = None,
        keep_reference: bool = False,
        stores_reference: bool = False,
    ) -> None:
        """Load a Hugging Face directory (collective); raise ValueError for a model or a layout that is not supported.

        `dtype` is that of parameters and activations; masters, gradients and moments are float32. `keep_reference`
        keeps a copy of the trained parameters for `reference_weights`, and `stores_reference` includes it in `shards`.
        """
        self.model_dir = model_dir
        self.config = config
        self.hf_config: Any = AutoConfig.from_pretrained(model_dir)
        self.family = family_of_model(self.hf_config)
        self.vocab_size: int = self.hf_config.vocab_size
        self.dtype = DTYPES[dtype]
        self.ranks = ranks
        check_supported(self.hf_config, config)
        parallel.set_up(config.tensor_parallel, config.pipeline_parallel, config.expert_parallel, seed)
        self.dp_rank: int = parallel_state.get_data_parallel_rank()
        self.dp_size: int = parallel_state.get_data_parallel_world_size()
        self.tp_rank: int = parallel_state.get_tensor_model_parallel_rank()
        self.pp_rank: int = parallel_state.get_pipeline_model_parallel_rank()
        self.pp_size: int = parallel_state.get_pipeline_model_parallel_world_size()
        tp_size = config.tensor_parallel
        self.model_rank = self.pp_rank * tp_size + self.tp_rank
        """This rank's index among those that hold the policy together and pass the same micro-batches."""
        self.model_size = self.pp_size * tp_size
        self.model, self._weights, megatron = self._load(fp8)
        self.lora = config.lora if trainable else None
        own = self.lora and weights.add_adapters(self.model, self._weights, self.lora, seed)
        self._trained = own or self._weights
        """The parameters that are trained and stored in checkpoints: the adapters, if there are any."""
        self._reference = [p.detach().clone() for p in self._trained_parameters()] if keep_reference else None
        self._reference_is_active = False
        self.stores_reference = stores_reference
        if fp8 is not None:
            fp8.attach(self.model)
        self.kv_observer: KvObserver | None = None
        """Observes queries, keys and values of the forward passes; None without an observer."""
        has_experts = self.family.router is not None
        self.routing = RoutingReplay(self.model, replays=config.routing_replay) if has_experts else None
        """Trains with the engine's routes if micro-batches have any; None for a policy without experts."""
        self._chain: Any = self.model.to(ranks.device)
        if self.dtype == torch.bfloat16:
            self._chain = Float16Module(megatron, self._chain)
        self._optimizer: PolicyOptimizer | None = None
        if trainable:
            self._chain = wrap(self._chain, megatron)
            self._optimizer = PolicyOptimizer(self._chain, config, dtype=self.dtype)
        else:
            self.model.eval().requires_grad_(False)

    def _load(self, fp8: LinearPrecision | None) -> tuple[PolicyModel, weights.WeightMap, TransformerConfig]:
        cuda = self.ranks.device.type == "cuda"
        if fp8 is not None and not fp8.is_native:
            cuda = False  # Megatron's local layers, on whatever device
        megatron = transformer_config(
            self.hf_config, self.dtype, cuda=cuda, recompute=self.config.recompute, native_fp8=cuda and fp8 is not None
        )
        megatron.finalize_model_grads_func = _sum_gradients
        model = build_model(self.hf_config, megatron, cuda=cuda)
        names = weights.weight_map(
            self.hf_config,
            pipeline_parallel=self.config.pipeline_parallel,
            expert_parallel=self.config.expert_parallel,
            transformer_engine=cuda,
        )
        weights.load(model, names, self.model_dir)
        return model, names, megatron

    @property
    def pad_multiple(self) -> int:
        """A micro-batch's number of tokens must be a multiple of this: pass it to `batches.pack`."""
        tokens = FP8_TOKENS if self.model.config.fp8 else 1
        # With sequence parallelism this applies to each rank's part of the row.
        return tokens * (self.config.tensor_parallel if self.model.config.sequence_parallel else 1)

    @property
    def optimizer(self) -> PolicyOptimizer:
        assert self._optimizer is not None, "this policy was built with trainable=False: it has no optimizer"
        return self._optimizer

    @property
    def shape_in_words(self) -> str:
        """The shape of the model in words, by which a checkpoint is matched to it."""
        hf = self.hf_config
        words = f"{hf.model_type}, {hf.num_hidden_layers} layers of {hf.hidden_size}, vocabulary {hf.vocab_size}"
        return words if self.lora is None else f"{words}, LoRA of rank {self.lora.rank} with alpha {self.lora.alpha:g}"

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return weights.tensor_shapes(self._trained)

    def _trained_parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def shards(self) -> list[Shard]:
        reference = self._reference if self.stores_reference else None
        return policy_shards(self.model, self._trained, self.optimizer, reference or ())

    def train_step(
        self,
        micro_batches: list[MicroBatch],
        loss: LossFn,
        *,
        features: tuple[int, ...] | None = None,
        windows: Mapping[int, Window] | None = None,
        temperature: float = 1.0,
        lr: float | None = None,
    ) -> tuple[dict[str, float], list[Features]]:
        """Update the policy once on all ranks' micro-batches; without any token, nothing changes (collective).

        Args:
            features: The layers whose features are kept. Index i means the residual stream that enters layer i, as in
                vLLM and SGLang; in a policy of n layers, index n means the one that leaves the last layer.
            windows: The features to keep and on which rank, by `TokenSequence.index`; the same on all ranks that hold
                the policy together. By default each rank keeps everything.
            temperature: The divisor of logits, so that log-probs are those of the sampled distribution.

        Returns:
            The loss function's metrics summed over all micro-batches, with `loss`, `lr` and `grad_norm` (before
            clipping); and the `Features` of each micro-batch of which this rank keeps a row.

        Raises:
            FloatingPointError: The loss or the gradient is not finite; the weights are unchanged.
        """
        assert not self._reference_is_active, "training inside reference_weights() would train the reference"
        self.optimizer.zero_grad()
        outcomes, kept = self._run(micro_batches, temperature, features, loss, windows)
        metrics = self._sum(outcomes)
        num_tokens = metrics.pop("num_tokens")
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the policy's loss is {metrics['loss']}; its weights are unchanged")
        metrics["lr"] = self.config.lr if lr is None else lr
        metrics["grad_norm"] = self.optimizer.step(metrics["lr"]) if num_tokens else 0.0
        return metrics, kept

    def logprobs(self, micro_batches: list[MicroBatch], *, temperature: float = 1.0) -> list[Tensor]:
        """The log-probs that a `LossFn` would get, by micro-batch, without a gradient (collective)."""
        outcomes, _ = self._run(micro_batches, temperature)
        last = self.pp_size - 1
        found = [outcome.logprobs for outcome in outcomes] if outcomes else [None] * len(micro_batches)
        return [
            parallel.from_stage(last, logprobs, tuple(batch.mask.shape), torch.float32)
            for logprobs, batch in zip(found, micro_batches, strict=False)
        ]

    def forward_features(
        self, micro_batches: list[MicroBatch], layers: tuple[int, ...], windows: Mapping[int, Window] | None = None
    ) -> list[Features]:
        """The drafter's features of each micro-batch, as `train_step` does, without an update (collective)."""
        return self._run(micro_batches, 1.0, layers, windows=windows)[1]

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        return export(self.model, self._weights)

    def save_pretrained(self, directory: Path, mtp_layer: Iterable[tuple[str, Tensor]] = ()) -> None:
        """Write a Hugging Face directory, with a trained multi-token-prediction layer (collective); rank 0 writes."""
        trained, left_out = dict(mtp_layer), HEAD if self._weights.tied else None
        own = ((name, tensor) for name, tensor in self.hf_weights() if name != left_out)
        others = ((name, trained.get(name, tensor).to(self.dtype)) for name, tensor in mtp_layers(self.model_dir))
        write_model(directory, self.model_dir, chain(own, others), self.dtype, writes=self.ranks.is_first)
        self.ranks.barrier()

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters, if any, in PEFT's format (collective); rank 0 writes."""
        if self.lora is None:
            return
        adapters = {name: tensor.cpu() for name, tensor in export(self.model, self._trained)}
        if self.ranks.is_first:
            write_adapter(directory, self.model_dir, self.lora, adapters)
        self.ranks.barrier()

    @torch.no_grad()
    def renew_reference(self) -> None:
        """Make the current parameters the reference, if one is kept."""
        for parameter, other in zip(self._trained_parameters(), self._reference or (), strict=False):
            other.copy_(parameter)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Swap in the reference's parameters inside the block; use it around `logprobs` for the KL penalty."""
        self._swap_reference()
        try:
            yield
        finally:
            self._swap_reference()

    @torch.no_grad()
    def _swap_reference(self) -> None:
        assert self._reference is not None, "build the policy with keep_reference=True"
        for parameter, other in zip(self._trained_parameters(), self._reference, strict=True):
            current = parameter.clone()
            parameter.copy_(other)
            other.copy_(current)
        self._reference_is_active = not self._reference_is_active

    def _run(
        self,
        micro_batches: list[MicroBatch],
        temperature: float,
        layers: tuple[int, ...] | None = None,
        loss: LossFn | None = None,
        windows: Mapping[int, Window] | None = None,
    ) -> tuple[list[_Outcome], list[Features]]:
        """Run forward and, with a loss, backward passes (collective); only the last stage has outcomes."""
        batches = [batch.to(self.ranks.device) for batch in self.evenly_many(micro_batches or [self._empty])]
        inputs = LayerInputs(self.model, layers or ())
        kept = [self._kept(batch, windows) if layers is not None else None for batch in batches]
        items = list(zip(batches, kept, strict=True))

        def forward_step(
            iterator: Iterator[tuple[MicroBatch, KeptRows | None]], model: Any
        ) -> tuple[Any, Callable[[HeadOutput], Any]]:
            batch, rows = next(iterator)
            outputs = rows.outputs if rows is not None else None
            head = HeadInput(batch.predictors, batch.targets, temperature, outputs)
            recording = inputs.micro_batch(rows) if rows is not None else nullcontext()
            with self._observed(batch, trains=loss is not None), recording:
                output = model(batch.tokens, batch.segments, head)
            return output, partial(_outcome, batch, loss)

        try:
            with torch.set_grad_enabled(loss is not None):
                outcomes = get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=iter(items),
                    model=[self._chain],
                    num_microbatches=len(batches),
                    seq_length=1,  # these two are not read: shapes vary and travel with the tensors
                    micro_batch_size=1,
                    forward_only=loss is None,
                )
        finally:
            inputs.remove()
        if self.routing is not None:
            self.routing.end_pass()
        return outcomes, self._features(layers, kept, inputs, outcomes) if layers is not None else []

    def _kept(self, batch: MicroBatch, windows: Mapping[int, Window] | None) -> KeptRows | None:
        """The rows that this tensor-parallel rank keeps, on any pipeline stage; None if no rank keeps any."""
        if windows is None:
            return KeptRows(batch) if batch.indices else None
        owners = range(self.tp_rank, self.model_size, self.config.tensor_parallel)
        return KeptRows(batch, windows, owners) if windows.keys() & batch.indices else None

    @contextmanager
    def _observed(self, batch: MicroBatch, *, trains: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if self.kv_observer is not None and (trains or not self.kv_observer.training_only):
                stack.enter_context(self.kv_observer.forward_pass(batch.num_real))
            if self.routing is not None:
                stack.enter_context(self.routing.micro_batch(batch, trains=trains))
            yield

    @property
    def _empty(self) -> MicroBatch:
        return empty_micro_batch(self.pad_multiple)

    def evenly_many(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Add empty micro-batches so that all ranks that share experts have the same number (collective)."""
        if self.config.expert_parallel == 1:
            return micro_batches
        most = torch.tensor(len(micro_batches), device=self.ranks.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=parallel_state.get_expert_model_parallel_group())
        return [*micro_batches, *[self._empty] * (int(most) - len(micro_batches))]

    def _features(
        self, layers: tuple[int, ...], kept: list[KeptRows | None], inputs: LayerInputs, outcomes: list[_Outcome]
    ) -> list[Features]:
        top1 = [outcome.top1 for outcome in outcomes] or [None] * len(kept)
        # Recorded tensors are released as they are taken over: keeping both would double the features' memory.
        found = [
            assemble(layers, rows, inputs.recorded.pop(0), own, self.hf_config, self.model_rank, self.dtype)
            for rows, own in zip(kept, top1, strict=True)
            if rows is not None
        ]
        return [features for features in found if features is not None]

    def _sum(self, outcomes: list[_Outcome]) -> dict[str, float]:
        chosen = outcomes if self.tp_rank == 0 else []
        own = {"num_tokens": torch.tensor(sum(item.num_tokens for item in chosen), dtype=torch.float64)}
        for item in chosen:
            for name, value in item.sums.items():
                own[name] = own.get(name, 0.0) + value.double()
        numbers = {name: float(tensor) for name, tensor in own.items()}  # the host's first wait for the pass
        total: dict[str, float] = {"loss": 0.0, "num_tokens": 0.0}
        for metrics in self.ranks.gather(numbers):
            for name, number in metrics.items():
                total[name] = total.get(name, 0.0) + number
        return total


def _outcome(batch: MicroBatch, loss: LossFn | None, head: HeadOutput) -> tuple[Tensor, Tensor, _Outcome]:
    logprobs, entropy = _spread(head.logprobs, batch.mask), _spread(head.entropy, batch.mask)
    value, metrics = head.logprobs.sum() * 0.0, dict[str, Tensor]()  # keeps every parameter in the graph
    if loss is not None and batch.indices:
        own, metrics = loss(logprobs, entropy, batch)
        value = value + own
    sums = {name: tensor.detach().float() for name, tensor in {**metrics, "loss": value}.items()}
    kept = _Outcome(logprobs.detach(), len(head.logprobs), head.top1, sums)
    return value, torch.ones((), dtype=torch.int, device=value.device), kept


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def _sum_gradients(model: list[Any], num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Reduce gradients as sums: losses are already divided, and Megatron would divide by its own token count."""
    finalize_model_grads(model, None, **kwargs)
